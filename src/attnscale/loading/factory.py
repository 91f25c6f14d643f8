"""`package.module:callable`: a model from the user's own code, with or without its inputs."""

import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from attnscale.errors import ModelError
from attnscale.loading.telling import telling

SPEC = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_factory(spec: str) -> bool:
    """Whether this is written like one; a path is not.

    >>> is_factory("mypackage.models:make_small"), is_factory("models/small")
    (True, False)
    """
    return SPEC.fullmatch(spec) is not None


def call_factory(spec: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Import it, from the current folder too, and call it: a model, and the inputs it came with."""
    with telling(f"make the model {spec}"):
        made = _made(spec)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Expected {spec} to be or to return an nn.Module, alone or as (model, inputs), got {type(made).__name__}."
        )
    if inputs is None or isinstance(inputs, Mapping):
        return model, (), dict(inputs or {})
    if not isinstance(inputs, Tensor | tuple | list):
        raise ModelError(
            f"Expected the inputs of {spec} as a tensor, a tuple or a dict of them, got {type(inputs).__name__}."
        )
    return model, (inputs,) if isinstance(inputs, Tensor) else tuple(inputs), {}


def _made(spec: str) -> Any:
    module_name, _, path = spec.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, and for good: a model may import when it runs
    found: Any = importlib.import_module(module_name)
    for name in path.split("."):
        found = getattr(found, name)
    return found if isinstance(found, nn.Module) or not callable(found) else found()
