"""Find the attention calls of a module while it runs, or while the compiler traces it, and hand them to its probes.

Functions that attend are seen by their name in an eager run, and by a torch-function mode while a graph is traced.
Attention that is written out is seen below autograd: a product of activations whose image comes to a softmax.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from attnscale.probes.functions import AttentionCall, Reader, read_sdpa, reader_of
from attnscale.torch_internals import DispatchMode, in_transform
from attnscale.tracing.softmaxes import PLAIN
from attnscale.watching.kernels import traits_of
from attnscale.watching.sdpa_names import SDPA, STATE, TORCH_NAMES, Redirected, is_redirected
from attnscale.watching.written.layout import layout_from

Carried = Tensor | tuple[Tensor, ...]  # the tensors that a probed module carries for a probe
NO_LAYOUT = "-"  # in the place of the layout of a call that a kernel computes
PRODUCTS = {"bmm": (0, 1), "baddbmm": (1, 2)}  # which arguments are the operands
PROJECTIONS = frozenset(("mm", "addmm", "convolution", "linear"))  # beyond which no product is followed


@dataclass(frozen=True, eq=False)
class WrittenScores:
    """The input of a softmax, and the two operands of the product that it was made from."""

    scores: Tensor
    left: Tensor
    right: Tensor
    layout: str  # its code


class ProbeKind:
    """What one kind of probe does; `carried` are its own tensors, `number` counts the calls in a run of the module."""

    def at_function(self, call: AttentionCall, carried: Any, number: int, is_traced: bool) -> AttentionCall:
        """Measure a function that attends; return the call to go on with."""
        return call

    def at_softmax(self, written: WrittenScores, carried: Any, number: int, is_traced: bool) -> None:
        """Measure an attention that is written out."""

    def at_entry(self, carried: Any, is_traced: bool) -> None:
        """Note that a run of the module begins."""

    def at_unplanned_softmax(self, carried: Any, is_traced: bool) -> None:
        """Note a softmax beyond those of the plan."""


KINDS: dict[str, ProbeKind] = {}  # by the name that a graph holds as a constant


class Frame:
    """One run of a probed module: its probes, each with what it carries, and the number of calls so far.

    `layouts` has the layout of each planned call that is written out; where there is none, nobody looks for them.
    """

    def __init__(self, names: str, layouts: str, carried: tuple[Carried, ...], is_traced: bool) -> None:
        kinds = (KINDS[name.rstrip("0123456789")] for name in names.split())
        self._probes = list(zip(kinds, carried, strict=True))
        self._calls, self._is_busy, self._is_traced = 0, False, is_traced
        self._layouts = layouts.split()
        self._modes: list[Any] = []
        self._names = Redirected(TORCH_NAMES)
        if any(layout != NO_LAYOUT for layout in self._layouts):
            self._modes.append(_SoftmaxMode(self))
        if is_traced:
            self._names.__enter__()  # torch functions call SDPA by its name, which no mode sees
        if is_traced or not is_redirected():
            self._modes.append(_FunctionMode(self))
        for mode in self._modes:
            mode.__enter__()
        for kind, own in self._probes:
            kind.at_entry(own, is_traced)

    def close(self) -> None:
        """End the run."""
        while self._modes:  # which hold this frame
            self._modes.pop().__exit__(None, None, None)
        if self._is_traced:
            self._names.__exit__(None, None, None)

    @property
    def is_innermost(self) -> bool:
        """Return True if the module's own code runs, and not that of a module inside it, a probe or a transform."""
        return FRAMES.innermost is self and not self._is_busy and not in_transform()

    def at_softmax(self, scores: Tensor, axis: int, left: Tensor, right: Tensor) -> None:
        """Measure a softmax over this axis of an image of a product."""
        number, self._calls = self._calls, self._calls + 1
        is_planned = number < len(self._layouts)
        layout = self._layouts[number] if is_planned else NO_LAYOUT
        is_known = layout != NO_LAYOUT and layout_from(layout).order[-1] == axis % scores.dim()
        self._is_busy = True
        try:
            for kind, carried in self._probes:
                if is_known:
                    kind.at_softmax(WrittenScores(scores, left, right, layout), carried, number, self._is_traced)
                elif not is_planned:
                    kind.at_unplanned_softmax(carried, self._is_traced)
        finally:
            self._is_busy = False

    def at_function(self, reader: Reader, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure a function that attends, then run it.

        Under a torch.func transform it only runs: nothing may be written there that the transform does not know of.
        """
        call = None if self._is_busy or in_transform() else reader(function, args, kwargs)
        if call is None:
            return function(*args, **kwargs)
        number, self._calls, self._is_busy = self._calls, self._calls + 1, True
        try:
            for kind, carried in self._probes:
                call = kind.at_function(call, carried, number, self._is_traced)
            return call.run(call.query, call.key)
        finally:
            self._is_busy = False


class _Frames(threading.local):
    """The runs of probed modules on this thread, the innermost last."""

    def __init__(self) -> None:
        self._open: list[Frame] = []

    @property
    def innermost(self) -> Frame | None:
        return self._open[-1] if self._open else None

    def enter(self, frame: Frame) -> None:
        self._open.append(frame)
        STATE.handler = self._at_sdpa

    def exit(self) -> None:
        self._open.pop().close()
        if not self._open:
            STATE.handler = None

    def _at_sdpa(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._open[-1].at_function(read_sdpa, SDPA, args, kwargs)


FRAMES = _Frames()


class _FunctionMode(TorchFunctionMode):
    """Sees every function that a traced graph calls."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self._frame = frame

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reader, kwargs = reader_of(function), kwargs or {}
        if reader is not None and FRAMES.innermost is self._frame:
            return self._frame.at_function(reader, function, args, kwargs)
        return function(*args, **kwargs)


class _SoftmaxMode(DispatchMode):  # type: ignore[misc]  # torch's own, untyped
    """Follows what is made of a product, up to the next product, and reports every softmax of it."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self._frame = frame
        self._products: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> the operands it was made from

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, traits_of(function).name
        if not self._frame.is_innermost:
            return function(*args, **kwargs)
        if name == PLAIN:
            operands = self._products.get(args[0])
            if operands is not None:
                self._frame.at_softmax(args[0], args[1], *operands)
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        if name in PRODUCTS:
            self._products[result] = tuple(args[at] for at in PRODUCTS[name])
        elif name not in PROJECTIONS and isinstance(result, Tensor):
            found = {id(operands): operands for operands in self._operands_among((*args, *kwargs.values()))}
            if len(found) == 1:
                self._products[result] = next(iter(found.values()))
        return result

    def _operands_among(self, given: tuple[Any, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        for each in given:
            if isinstance(each, Tensor):
                operands = self._products.get(each)
                if operands is not None:
                    yield operands
            elif isinstance(each, (tuple, list)):
                yield from self._operands_among(tuple(each))
