"""The two marks around what a module does, and what happens to a function that attends between them.

In a compiled model the marks are nodes of its graph. Dynamo asks them for shapes alone; when autograd traces the graph,
or a backend runs it as it is, they put a mode in place that sees every function the graph calls. A mode that Dynamo
itself would see is never left in place, so nothing else is compiled otherwise.
"""

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnscale.inside.given import READERS, Given
from attnscale.torch_internals import is_fake

# What is done at a call, by the name of the look: what was given, the look's own tensor, the number of the call in its
# module, and whether it is traced -> what to go on with.
Look = Callable[[Given, Tensor, int, bool], Given]
LOOKS: dict[str, Look] = {}


class _Frames(threading.local):
    def __init__(self) -> None:
        self.open: list[_Frame] = []


class _Frame:
    """One run of a module: its looks, each with a tensor of its own, and how many calls there were."""

    def __init__(self, names: str, tensors: tuple[Tensor, ...], is_traced: bool) -> None:
        self._looks = list(zip(map(_look, names.split()), tensors, strict=True))
        self._calls, self._is_busy = 0, False
        self.mode = _Mode(self) if is_traced else None

    def attends(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that attends is called: look at what it was given, then let it be called as it is."""
        given = None if self._is_busy else READERS[function](args, kwargs)
        if given is None:
            return function(*args, **kwargs)
        number, self._calls, self._is_busy = self._calls, self._calls + 1, True
        try:
            for look, tensor in self._looks:
                given = look(given, tensor, number, self.mode is not None)
            return given.again(given.query, given.key)
        finally:
            self._is_busy = False


def _look(name: str) -> Look:
    return LOOKS[name.rstrip("0123456789")]


class _Mode(TorchFunctionMode):
    def __init__(self, frame: _Frame) -> None:
        super().__init__()
        self._frame = frame

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in READERS:
            return self._frame.attends(function, args, kwargs)
        return function(*args, **kwargs)


FRAMES = _Frames()


def called(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that attends was called by its name: between two marks, or anywhere else."""
    if FRAMES.open:
        return FRAMES.open[-1].attends(function, args, kwargs)
    return function(*args, **kwargs)


def begin(names: str, *tensors: Tensor) -> None:
    """A module begins, in an eager run."""
    FRAMES.open.append(_Frame(names, tensors, is_traced=False))


def end(*tensors: Tensor) -> None:
    """It has run."""
    if FRAMES.open:
        FRAMES.open.pop()


def begin_in_graph(names: str, *tensors: Tensor) -> None:
    """A module begins, in a graph that is traced."""
    if is_fake((type(tensors[0]),)):
        return  # Dynamo asks for shapes
    frame = _Frame(names, tensors, is_traced=True)
    FRAMES.open.append(frame)
    assert frame.mode is not None
    frame.mode.__enter__()


def end_in_graph(*tensors: Tensor) -> None:
    """It has run."""
    if is_fake((type(tensors[0]),)) or not FRAMES.open:
        return
    mode = FRAMES.open.pop().mode
    if mode is not None:
        mode.__exit__(None, None, None)


@cache
def stand_in_graphs() -> None:
    """Let Dynamo put the marks into graphs as they are; it takes a second to load."""
    for mark in (begin_in_graph, end_in_graph):
        torch.fx.node.has_side_effect(mark)
        torch.compiler.allow_in_graph(mark)
