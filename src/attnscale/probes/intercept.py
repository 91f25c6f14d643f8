"""Find the attention calls of a module while it runs, or while the compiler traces it, and hand them to its probes.

Functions that attend are seen by their name in an eager run, and by a torch-function mode while a graph is traced.
Attention that is written out is seen below autograd: a product of activations whose image comes to a softmax.
"""

import math
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from attnscale.torch_internals import DispatchMode, in_transform
from attnscale.tracing.softmaxes import PLAIN
from attnscale.visibility import Visibility
from attnscale.watching.kernels import traits_of
from attnscale.watching.kernels.sdpa import ARGUMENTS as FLEX_ARGUMENTS
from attnscale.watching.layout import Layout, layout_from
from attnscale.watching.rows import keys_nobody_sees
from attnscale.watching.sdpa_names import SDPA, STATE, TORCH_NAMES, Redirected, is_redirected

FLEX = "flex_attention"  # the name of torch's higher-order operator; importing it loads the compiler
SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class Modification(NamedTuple):
    """FlexAttention's two functions, by their number in MODIFICATIONS, and the tensors that they take."""

    functions: int
    score_buffers: tuple[Tensor, ...]
    mask_buffers: tuple[Tensor, ...]


MODIFICATIONS: list[tuple[Any, Any]] = []  # score_mod and mask_mod of each traced call, where an op finds them


class AttentionCall(NamedTuple):
    """Arguments of a function that attends: query (batch, heads, q_len, d), key (batch, kv_heads, kv_len, d)."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    hidden_keys: Tensor | None  # keys that the mask hides from every query; a graph computes it once for all layers
    is_causal: bool
    scale: float
    run: Callable[[Tensor, Tensor], Any] | None = None  # the call itself, on a query and a key
    modification: Modification | None = None
    run_with_maxima: Callable[[Tensor, Tensor], tuple[Any, Tensor]] | None = None  # also returns each row's maximum


Reader = Callable[[Any, tuple[Any, ...], dict[str, Any]], AttentionCall | None]


def read_sdpa(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall | None:
    """Read the arguments of SDPA; None where no probe takes them."""
    given = dict(zip(SDPA_ARGUMENTS, args, strict=False)) | kwargs
    query, key, mask, scale = given["query"], given["key"], given.get("attn_mask"), given.get("scale")
    if query.dim() != 4 or query.is_nested or key.is_nested:
        return None
    return AttentionCall(
        query,
        key,
        mask,
        None if mask is None else keys_nobody_sees(Visibility.of(mask, is_causal=False).mask),
        bool(given.get("is_causal")),
        query.shape[-1] ** -0.5 if scale is None else float(scale),
        lambda query, key: function(**(given | {"query": query, "key": key})),
    )


def read_flex(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall | None:
    """Read the arguments of FlexAttention as it is traced: an eager run compiles it by itself, where no probe is."""
    given = dict(zip(FLEX_ARGUMENTS, args, strict=False)) | kwargs
    buffers = [tuple(given.get(name, ())) for name in ("score_buffers", "mask_buffers")]
    if not all(isinstance(buffer, Tensor) for some in buffers for buffer in some):
        return None
    MODIFICATIONS.append((given["score_mod"], given["block_mask"][-1]))

    def run(query: Tensor, key: Tensor, **options: bool) -> Any:
        changed = {"query": query, "key": key, "kernel_options": {**given["kernel_options"], **options}}
        return function(*((given | changed)[name] for name in FLEX_ARGUMENTS if name in given))

    def run_with_maxima(query: Tensor, key: Tensor) -> tuple[Any, Tensor]:
        returned = run(query, key, OUTPUT_MAX=True)
        return returned, returned[2] * math.log(2)  # the kernel counts in powers of two

    modification = Modification(len(MODIFICATIONS) - 1, *buffers)
    scale = float(given["scale"])
    return AttentionCall(given["query"], given["key"], None, None, False, scale, run, modification, run_with_maxima)


def reader_of(function: Any) -> Reader | None:
    """Return the reader of a function's arguments; None where it does not attend."""
    if function is SDPA:
        return read_sdpa
    return read_flex if str(function) == FLEX else None


Carried = Tensor | tuple[Tensor, ...]  # the tensors that a probed module carries for a probe
NO_LAYOUT = "-"  # in the place of the layout of a call that a kernel computes
PRODUCTS = {"bmm": (0, 1), "baddbmm": (1, 2)}  # which arguments are the operands
PROJECTIONS = frozenset(("mm", "addmm", "convolution", "linear"))  # beyond which no product is followed


class WrittenScores(NamedTuple):
    """The input of a softmax, and the two operands of the product that it was made from."""

    scores: Tensor
    left: Tensor
    right: Tensor
    layout: Layout

    def fits(self, layout: Layout) -> bool:
        """Return True if these tensors have this layout."""
        return self.layout == layout and layout.fits(self.scores, self.left, self.right)


class ProbeKind:
    """One kind of probe; `carried` are its own tensors, and `number` counts the calls in a run of the module."""

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


@lru_cache
def _kinds(names: str) -> tuple[ProbeKind, ...]:
    return tuple(KINDS[name.rstrip("0123456789")] for name in names.split())


@lru_cache
def _split(layouts: str) -> tuple[list[str], bool]:
    """Return the layout of each planned call, and True if one is written out."""
    found = layouts.split()
    return found, any(layout != NO_LAYOUT for layout in found)


class Frame:
    """One run of a probed module: its probes, each with what it carries, and the number of calls so far.

    `layouts` has the layout of each planned call that is written out; where there is none, nobody looks for them.
    """

    def __init__(self, names: str, layouts: str, carried: tuple[Carried, ...], is_traced: bool) -> None:
        self._probes = list(zip(_kinds(names), carried, strict=True))
        self._calls, self._is_busy, self._is_traced = 0, False, is_traced
        self._layouts, has_written = _split(layouts)
        self._contexts: list[Any] = [_SoftmaxMode(self)] if has_written else []
        if is_traced:
            self._contexts.append(Redirected(TORCH_NAMES))  # torch functions call SDPA by its name, which no mode sees
        if is_traced or not is_redirected():
            self._contexts.append(_FunctionMode(self))
        for context in self._contexts:
            context.__enter__()
        for kind, own in self._probes:
            kind.at_entry(own, is_traced)

    def close(self) -> None:
        """End the run."""
        while self._contexts:  # of which modes hold this frame
            self._contexts.pop().__exit__(None, None, None)

    @property
    def is_innermost(self) -> bool:
        """Return True if the module's own code runs, and not that of a module inside it, a probe or a transform."""
        return FRAMES.innermost is self and not self._is_busy and not in_transform()

    def at_softmax(self, scores: Tensor, axis: int, left: Tensor, right: Tensor) -> None:
        """Measure a softmax over this axis of an image of a product."""
        number, self._calls = self._calls, self._calls + 1
        is_planned = number < len(self._layouts)
        code = self._layouts[number] if is_planned else NO_LAYOUT
        layout = None if code == NO_LAYOUT else layout_from(code)
        layout = layout if layout is None or layout.order[-1] == axis % scores.dim() else None
        self._is_busy = True
        try:
            for kind, carried in self._probes:
                if layout is not None:
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
            assert call.run is not None  # or there is nothing to intercept
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
