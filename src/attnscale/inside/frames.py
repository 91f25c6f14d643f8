"""The runs of modules that are looked at, on each thread, and what happens to a function that attends in one."""

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from attnscale.inside.given import Given, Reader

# What is done at a call, by the name of the look: what was given, the look's own tensor, the number of the call in its
# module, and whether it is traced -> what to go on with.
Look = Callable[[Given, Tensor, int, bool], Given]
LOOKS: dict[str, Look] = {}


class Frame:
    """One run of a module: its looks, each with a tensor of its own, and how many calls there were."""

    def __init__(self, names: str, tensors: tuple[Tensor, ...], is_traced: bool) -> None:
        looks = (LOOKS[name.rstrip("0123456789")] for name in names.split())
        self._looks = list(zip(looks, tensors, strict=True))
        self._calls, self._is_busy, self._is_traced = 0, False, is_traced

    def attends(self, reader: Reader, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that attends is called: look at what it was given, then let it be called as it is."""
        given = None if self._is_busy else reader(function, args, kwargs)
        if given is None:
            return function(*args, **kwargs)
        number, self._calls, self._is_busy = self._calls, self._calls + 1, True
        try:
            for look, tensor in self._looks:
                given = look(given, tensor, number, self._is_traced)
            return given.again(given.query, given.key)
        finally:
            self._is_busy = False


class _Frames(threading.local):
    def __init__(self) -> None:
        self.open: list[Frame] = []


FRAMES = _Frames()


def called(reader: Reader, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that attends was called by its name: in a module that is looked at, or anywhere else."""
    if FRAMES.open:
        return FRAMES.open[-1].attends(reader, function, args, kwargs)
    return function(*args, **kwargs)
