"""Redirect the Python names of SDPA while a model is traced or has probes.

A trace sees SDPA's kernels. The redirection shows whether a probe can intercept the function as well.
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
    depth = 0  # running calls of SDPA by a redirected name
    handler: Handler | None = None  # runs SDPA in a probed module
    observer: Callable[[], None] | None = None  # notified of calls outside any probed module


STATE = _State()


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
    """Run torch's SDPA; a probed module measures it first."""
    if torch.compiler.is_dynamo_compiling():  # compiled graphs get their probes when traced
        return SDPA(*args, **kwargs)
    STATE.depth += 1
    try:
        if STATE.handler is not None:
            return STATE.handler(args, kwargs)
        if STATE.observer is not None and type(args[0] if args else kwargs["query"]) is torch.Tensor:  # not a trace
            STATE.observer()
        return SDPA(*args, **kwargs)
    finally:
        STATE.depth -= 1


def is_called_by_name() -> bool:
    """Return True if SDPA was called by a redirected name."""
    return STATE.depth > 0


def is_redirected() -> bool:
    """Return True if torch's own name is redirected."""
    return F.scaled_dot_product_attention is scaled_dot_product_attention


def names_of_sdpa(files: Collection[str] | None = None) -> list[Name]:
    """Return torch's name of SDPA, and the names under which modules of these files (None: all) imported it."""
    imported = (
        (module_name, name)
        for module_name, module in list(sys.modules.items())
        if module is not F and (files is None or getattr(module, "__file__", None) in files)
        for name, value in list(getattr(module, "__dict__", {}).items())
        if value is SDPA or value is scaled_dot_product_attention
        if not module_name.startswith(("attnscale.", "torch._C"))  # these run SDPA itself
    )
    return [*TORCH_NAMES, *imported]


class Redirected:
    """Context that redirects these names to scaled_dot_product_attention() above; contexts may overlap."""

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
