"""The runs of modules that are looked at, on each thread, and what happens to a function that attends in one."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnscale.inside.given import Given, Reader
from attnscale.inside.written import Following, Written
from attnscale.torch_internals import in_transform
from attnscale.watching.written.layout import layout_from


@dataclass(frozen=True)
class Look:
    """What is done at a call: with the look's own tensors, the number of the call in its module, whether it is traced.

    At a function that attends, what was given is handed on to go on with; at a softmax nothing is changed. As a run of
    the module begins there is no call yet, and at a softmax beyond those that are known nothing to know it by.
    """

    at_function: Callable[[Given, Any, int, bool], Given]
    at_softmax: Callable[[Written, Any, int, bool], None]
    as_it_begins: Callable[[Any, bool], None] = lambda *_: None
    beyond: Callable[[Any, bool], None] = lambda *_: None


Carried = Tensor | tuple[Tensor, ...]  # by a module, for a look
LOOKS: dict[str, Look] = {}
KERNEL = "-"  # in the place of the layout of an attention written out
BETWEEN = " "


class Frame:
    """One run of a module: its looks, each with what it carries, and how many calls there were.

    `layouts` are those of its calls that are attention written out; where there are none, nobody looks for them.
    """

    def __init__(self, names: str, layouts: str, carried: tuple[Carried, ...], is_traced: bool) -> None:
        looks = (LOOKS[name.rstrip("0123456789")] for name in names.split())
        self._looks = list(zip(looks, carried, strict=True))
        self._calls, self._is_busy, self._is_traced = 0, False, is_traced
        self._layouts = layouts.split(BETWEEN)
        self._following: Any = None
        if any(layout != KERNEL for layout in self._layouts):
            self._following = Following(self)
            self._following.__enter__()
        for look, own in self._looks:
            look.as_it_begins(own, is_traced)

    def end(self) -> None:
        """It is over."""
        if self._following is not None:
            self._following.__exit__(None, None, None)
            self._following = None  # it holds this

    @property
    def is_innermost(self) -> bool:
        """Whether what runs is its own, and not that of another module in it, of a look, or of a transform."""
        return FRAMES.open[-1:] == [self] and not self._is_busy and not in_transform()

    def takes_softmax(self, scores: Tensor, axis: int, left: Tensor, right: Tensor) -> None:
        """A softmax is about to be taken, over this axis, of what was made of a product."""
        number, self._calls = self._calls, self._calls + 1
        layout = self._layouts[number] if number < len(self._layouts) else KERNEL
        if layout == KERNEL or layout_from(layout).order[-1] != axis % scores.dim():
            if number >= len(self._layouts):
                self._exceeds()
            return  # another than was known, which is missed
        self._is_busy = True
        try:
            for look, carried in self._looks:
                look.at_softmax(Written(scores, left, right, layout), carried, number, self._is_traced)
        finally:
            self._is_busy = False

    def _exceeds(self) -> None:
        """There is a softmax more than in the runs that were followed."""
        self._is_busy = True
        try:
            for look, carried in self._looks:
                look.beyond(carried, self._is_traced)
        finally:
            self._is_busy = False

    def attends(self, reader: Reader, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that attends is called: look at what it was given, then let it be called as it is.

        Not where torch.func transforms it, which lets nothing be written to that it does not know of.
        """
        given = None if self._is_busy or in_transform() else reader(function, args, kwargs)
        if given is None:
            return function(*args, **kwargs)
        number, self._calls, self._is_busy = self._calls, self._calls + 1, True
        try:
            for look, carried in self._looks:
                given = look.at_function(given, carried, number, self._is_traced)
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
