"""The names under which Python code calls SDPA, redirected while a model is traced or has probes.

A trace sees SDPA's kernels; whether a probe will see the function as well is found out by this.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F

SDPA = F.scaled_dot_product_attention
Name = tuple[str, str]  # module, attribute
TORCH_NAMES: tuple[Name, ...] = ((F.__name__, SDPA.__name__),)
Handler = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_HOLDERS: Counter[Name] = Counter()
_LOCK = threading.Lock()


class _State(threading.local):
    depth = 0  # calls of SDPA by a redirected name that are running
    handler: Handler | None = None  # runs SDPA in a probed module
    observer: Callable[[], None] | None = None  # told of calls outside any probed module


STATE = _State()


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
    """Run torch's SDPA; a probed module measures it first."""
    if torch.compiler.is_dynamo_compiling():  # a graph is measured when it is traced
        return SDPA(*args, **kwargs)
    STATE.depth += 1
    try:
        if STATE.handler is not None:
            return STATE.handler(args, kwargs)
        if STATE.observer is not None and type(args[0] if args else kwargs["query"]) is torch.Tensor:  # no trace
            STATE.observer()
        return SDPA(*args, **kwargs)
    finally:
        STATE.depth -= 1


def is_called_by_name() -> bool:
    """Return True if a redirected name of SDPA led here."""
    return STATE.depth > 0


def is_redirected() -> bool:
    """Return True if torch's own name is redirected."""
    return F.scaled_dot_product_attention is scaled_dot_product_attention


def names_of_sdpa(files: Collection[str] | None = None) -> list[Name]:
    """Return torch's own name of SDPA, and names under which modules of these files, or all, imported it."""
    imported = (
        (module_name, name)
        for module_name, module in list(sys.modules.items())
        if module is not F and (files is None or getattr(module, "__file__", None) in files)
        for name, value in list(getattr(module, "__dict__", {}).items())
        if value is SDPA or value is scaled_dot_product_attention
        if not module_name.startswith(("attnscale.", "torch._C"))  # what runs SDPA itself
    )
    return [*TORCH_NAMES, *imported]


class Redirected:
    """A context in which these names lead to the function above; it may be held several times at once."""

    def __init__(self, names: Collection[Name]) -> None:
        self._names = names

    def __enter__(self) -> None:
        with _LOCK:
            for module, name in self._names:
                if module in sys.modules:
                    setattr(sys.modules[module], name, scaled_dot_product_attention)
                    _HOLDERS[module, name] += 1

    def __exit__(self, *_: object) -> None:
        with _LOCK:
            for module, name in self._names:
                _HOLDERS[module, name] -= 1
                if _HOLDERS[module, name] <= 0:
                    del _HOLDERS[module, name]
                    if getattr(sys.modules.get(module), name, None) is scaled_dot_product_attention:
                        setattr(sys.modules[module], name, SDPA)
