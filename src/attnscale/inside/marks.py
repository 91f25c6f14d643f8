"""The two marks around what a module does.

In a compiled model they are nodes of its graph. Dynamo asks them for shapes alone; when autograd traces the graph, or a
backend runs it as it is, they put a mode in place that sees every function the graph calls, and lead names here for
functions that are made of others. A mode that Dynamo itself would see is never left in place, so nothing else is
compiled otherwise.
"""

from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from attnscale.inside.frames import FRAMES, Carried, Frame
from attnscale.inside.given import reader_of
from attnscale.inside.names import TORCH_NAMES, hold, let_go
from attnscale.torch_internals import is_fake


class _Traced(Frame):
    """A run that is traced."""

    def __init__(self, names: str, layouts: str, carried: tuple[Carried, ...]) -> None:
        super().__init__(names, layouts, carried, is_traced=True)
        mode: Any = _Mode(self)
        self._mode = mode
        hold(TORCH_NAMES)
        mode.__enter__()

    def end(self) -> None:
        """It is over."""
        self._mode.__exit__(None, None, None)
        let_go(TORCH_NAMES)
        super().end()


class _Mode(TorchFunctionMode):
    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self._frame = frame

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reader = reader_of(function)
        if reader is not None:
            return self._frame.attends(reader, function, args, kwargs)
        return function(*args, **kwargs)


def begin(names: str, layouts: str, *carried: Carried) -> None:
    """A module begins, in an eager run."""
    FRAMES.open.append(Frame(names, layouts, carried, is_traced=False))


def end() -> None:
    """It has run."""
    FRAMES.open.pop().end()


def begin_in_graph(names: str, layouts: str, *carried: Carried) -> None:
    """A module begins, in a graph that is traced."""
    if not _are_shapes(carried):
        FRAMES.open.append(_Traced(names, layouts, carried))


def end_in_graph(*carried: Carried) -> None:
    """It has run."""
    if not _are_shapes(carried) and FRAMES.open:
        frame = FRAMES.open.pop()
        assert isinstance(frame, _Traced)
        frame.end()


def _are_shapes(carried: tuple[Carried, ...]) -> bool:
    """Whether Dynamo asks, for shapes alone."""
    first = carried[0][0] if isinstance(carried[0], tuple) else carried[0]
    return is_fake((type(first),))


def abandon() -> None:
    """Leave nothing of a run that was broken off, as by an error in the middle of tracing."""
    while FRAMES.open:
        FRAMES.open.pop().end()


@cache
def stand_in_graphs() -> None:
    """Let Dynamo put the marks into graphs as they are; it takes a second to load."""
    for mark in (begin_in_graph, end_in_graph):
        torch.fx.node.has_side_effect(mark)
        torch.compiler.allow_in_graph(mark)
