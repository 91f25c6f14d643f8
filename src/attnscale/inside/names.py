"""The names by which an eager run calls functions that attend: each leads here for as long as any module is looked at.

They are those of torch itself, and those of files that took it from there by `from torch.nn.functional import …`.
"""

import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from attnscale.inside.frames import called
from attnscale.inside.given import READERS, SDPA

Name = tuple[str, str]  # module, attribute
TORCH_NAMES: tuple[Name, ...] = ((F.__name__, SDPA.__name__),)


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
    """torch's own, seen where it is called between two marks."""
    if torch.compiler.is_dynamo_compiling():
        return SDPA(*args, **kwargs)  # seen between the marks of its graph
    return called(READERS[SDPA], SDPA, args, kwargs)


_HOLDERS: Counter[Name] = Counter()
_LOCK = threading.Lock()


def names_in(files: Collection[str]) -> list[Name]:
    """torch's own name of what attends, and those that modules of these files have for it."""
    return [*TORCH_NAMES, *_imported(files)]


def _imported(files: Collection[str]) -> Iterator[Name]:
    for module_name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) in files and module is not F:
            yield from (
                (module_name, name)
                for name, value in list(vars(module).items())
                if value is SDPA or value is scaled_dot_product_attention
            )


def hold(names: Collection[Name]) -> None:
    """Lead these names here."""
    with _LOCK:
        for module, name in names:
            if module in sys.modules:
                setattr(sys.modules[module], name, scaled_dot_product_attention)
                _HOLDERS[module, name] += 1


def lead_here() -> bool:
    """Whether torch's own name does."""
    return F.scaled_dot_product_attention is scaled_dot_product_attention


def let_go(names: Collection[Name]) -> None:
    """Lead them where they led, once nobody holds them."""
    with _LOCK:
        for module, name in names:
            _HOLDERS[module, name] -= 1
            if _HOLDERS[module, name] <= 0:
                del _HOLDERS[module, name]
                if getattr(sys.modules.get(module), name, None) is scaled_dot_product_attention:
                    setattr(sys.modules[module], name, SDPA)
