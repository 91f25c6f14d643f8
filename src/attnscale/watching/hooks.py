"""Hooks that tell of modules as they run: of all that there are, or of a few."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

Enter = Callable[[nn.Module, Any], None]
Leave = Callable[[nn.Module, Any, Any], None]


def hook_all(enter: Enter, leave: Leave) -> list[RemovableHandle]:
    """Global ones: with hooks of its own a module would leave torch's fast path."""
    return [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]


def hook_some(modules: Iterable[nn.Module], enter: Enter, leave: Leave) -> list[RemovableHandle]:
    """Of their own, before all others, as global ones are: then no other module is called the slow way."""
    handles = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(Hook(enter), prepend=True))
        handles.append(module.register_forward_hook(Hook(leave), prepend=True, always_call=True))
    return handles


class Hook:
    """Calls what it was given; in a copy of its module, or a pickle, it is one that does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """As torch calls it."""
        self._call(*args)

    def __reduce__(self) -> Any:
        return Hook, (nothing,)


def nothing(*_: Any) -> None:
    """What a copied hook does."""
