"""Find the attention calls of a module while it runs, or while the compiler traces it, and hand them to its probes.

In an eager run, SDPA is intercepted by its redirected Python name; while a graph is traced, a torch-function mode
intercepts it. Hand-written attention is found below autograd: a product of activations that leads to a softmax.
"""

import math
import threading
from collections.abc import Iterator
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
from attnscale.watching.layout import layout_from
from attnscale.watching.plan import ModulePlan
from attnscale.watching.rows import keys_nobody_sees
from attnscale.watching.sdpa_names import SDPA, STATE, TORCH_NAMES, Redirected, is_redirected

KERNEL = "-"  # used instead of a layout: SDPA computes the call
ROW_MAXIMA = "rows"  # used instead of a layout: FlexAttention computes the call; scores are the maxima of rows
ITSELF = "="  # prefix of a layout: queries and keys have the same positions
SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class Modification(NamedTuple):
    """FlexAttention's two functions, by their index in MODIFICATIONS, and the tensors that they read."""

    functions: int
    buffers: list[Tensor]  # those of score_mod, then those of mask_mod


# score_mod, mask_mod and number of score_mod's buffers of each traced call; never freed, since a graph may use them.
MODIFICATIONS: list[tuple[Any, Any, int]] = []


class AttentionCall(NamedTuple):
    """One attention call: query (batch, heads, q_len, d) and key (batch, kv_heads, kv_len, d) of SDPA or FlexAttention.

    For hand-written attention, query and key are the two operands of the product, in their original layout.
    """

    query: Tensor
    key: Tensor
    scores: Tensor | None = None  # input of the softmax, if hand-written
    mask: Tensor | None = None
    hidden_keys: Tensor | None = None  # hidden by the mask from every query; a graph computes it once for all layers
    layout: str = KERNEL  # order of the axes of scores and operands
    attends_itself: bool = False  # queries and keys have the same positions
    is_causal: bool = False
    scale: float = 1.0
    modification: Modification | None = None  # None unless FlexAttention computes the call

    def detached(self) -> "AttentionCall":
        """Return the call with tensors detached from autograd."""
        scores = None if self.scores is None else self.scores.detach()
        return self._replace(query=self.query.detach(), key=self.key.detach(), scores=scores)

    @property
    def is_written(self) -> bool:
        """True for hand-written attention."""
        return self.layout not in (KERNEL, ROW_MAXIMA)

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The fields that are tensors."""
        return self[:5]

    @property
    def constants(self) -> tuple[Any, ...]:
        """The fields that a graph stores as constants."""
        return self[5:9]


def read_sdpa(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall | None:
    """Read the arguments of SDPA; None if no probe supports them."""
    inputs = dict(zip(SDPA_ARGUMENTS, args, strict=False)) | kwargs
    query, key, mask, scale = inputs["query"], inputs["key"], inputs.get("attn_mask"), inputs.get("scale")
    if query.dim() != 4 or query.is_nested or key.is_nested:
        return None
    return AttentionCall(
        query,
        key,
        mask=mask,
        hidden_keys=None if mask is None else keys_nobody_sees(Visibility.of(mask, is_causal=False).mask),
        is_causal=bool(inputs.get("is_causal")),
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
    )


def read_flex(inputs: dict[str, Any]) -> AttentionCall | None:
    """Read the arguments of FlexAttention while a graph is traced; None if no probe supports them."""
    own, others = inputs["score_buffers"], inputs["mask_buffers"]
    if not all(isinstance(buffer, Tensor) for buffer in (*own, *others)):
        return None
    MODIFICATIONS.append((inputs["score_mod"], inputs["block_mask"][-1], len(own)))
    modification = Modification(len(MODIFICATIONS) - 1, [buffer.detach() for buffer in (*own, *others)])
    return AttentionCall(inputs["query"], inputs["key"], scale=float(inputs["scale"]), modification=modification)


ProbeTensors = Tensor | tuple[Tensor, ...]  # tensors that a probed module stores for a probe
PRODUCTS = {"bmm": (0, 1), "baddbmm": (1, 2)}  # argument positions of the operands
PROJECTIONS = frozenset(("mm", "addmm", "convolution", "linear"))  # results of these are not followed further


class ProbeKind:
    """One kind of probe. Its module stores its `tensors`; in a graph, they are of a subclass of Tensor."""

    def at_entry(self, tensors: Any) -> None:
        """Record that a run of the module begins."""

    def at_call(self, call: AttentionCall, tensors: Any, number: int) -> None:
        """Measure a call; `number` is its index among the calls in this run of the module."""

    def at_unplanned_softmax(self, tensors: Any) -> None:
        """Record a softmax that is not in the plan."""


class PlannedLayout(NamedTuple):
    """Layout of a planned call, for its probes."""

    code: str
    attends_itself: bool


UNPLANNED = PlannedLayout(KERNEL, False)
KINDS: dict[str, ProbeKind] = {}  # by name; a graph stores the name as a constant


@lru_cache
def _kinds(names: str) -> tuple[ProbeKind, ...]:
    return tuple(KINDS[name.rstrip("0123456789")] for name in names.split())


def layouts_of(module: ModulePlan) -> str:
    """Return the layouts of a module's planned calls as text, which a graph can store as a constant."""
    codes = (KERNEL if call.written is None else call.written.layout.code for call in module.calls)
    owns = (ITSELF * call.template.attends_itself for call in module.calls)
    return " ".join(map(str.__add__, owns, codes))


@lru_cache
def _split(layouts: str) -> tuple[list[PlannedLayout], bool]:
    """Reverse layouts_of(): return the layout of each call, and True if one of the calls is hand-written."""
    found = [PlannedLayout(each.removeprefix(ITSELF), each.startswith(ITSELF)) for each in layouts.split()]
    return found, any(each.code != KERNEL for each in found)


class Frame:
    """One run of a probed module: its probes, each with its tensors, and the number of calls so far.

    `layouts` has the layout of each planned call; without a hand-written one, softmaxes are not intercepted.
    """

    def __init__(self, names: str, layouts: str, tensors: tuple[ProbeTensors, ...], is_traced: bool) -> None:
        self._probes = list(zip(_kinds(names), tensors, strict=True))
        self._calls, self._is_busy = 0, False
        self._layouts, has_written = _split(layouts)
        self._contexts: list[Any] = [_SoftmaxMode(self)] if has_written else []
        if is_traced:
            self._contexts.append(Redirected(TORCH_NAMES))  # no mode sees the calls of SDPA by torch's own functions
        if is_traced or not is_redirected():
            self._contexts.append(_FunctionMode(self))
        for context in self._contexts:
            context.__enter__()
        for kind, own in self._probes:
            kind.at_entry(own)

    def close(self) -> None:
        """End the run."""
        while self._contexts:  # the modes among them hold references to this frame
            self._contexts.pop().__exit__(None, None, None)

    @property
    def is_innermost(self) -> bool:
        """Return True if the module's own code runs, not the code of an inner module, of a probe or of a transform."""
        return FRAMES.innermost is self and not self._is_busy and not in_transform()

    def at_softmax(self, scores: Tensor, axis: int, left: Tensor, right: Tensor) -> None:
        """Measure a softmax over this axis of scores, which were computed from the product of `left` and `right`."""
        planned = self._next()
        if planned is None:
            for kind, tensors in self._probes:
                kind.at_unplanned_softmax(tensors)
        elif planned.code != KERNEL and layout_from(planned.code).order[-1] == axis % scores.dim():
            self._measure(AttentionCall(left, right, scores, layout=planned.code), planned)

    def at_sdpa(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure a call of SDPA, then run it.

        Under a torch.func transform, do not measure: a probe would write to tensors that the transform does not know.
        """
        call = None if self._is_busy or in_transform() else read_sdpa(args, kwargs)
        if call is not None:
            planned = self._next()
            self._measure(call, planned or UNPLANNED)
        return SDPA(*args, **kwargs)

    def at_flex(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run FlexAttention with the maximum of each row, and measure it."""
        inputs = dict(zip(FLEX_ARGUMENTS, args, strict=False)) | kwargs
        call = None if self._is_busy or in_transform() else read_flex(inputs)
        if call is None:
            return function(*args, **kwargs)
        inputs["kernel_options"] = {**inputs["kernel_options"], "OUTPUT_MAX": True}
        returned = function(*(inputs[name] for name in FLEX_ARGUMENTS))
        maxima = returned[2].detach() * math.log(2)  # the kernel uses base 2
        self._measure(call._replace(scores=maxima, layout=ROW_MAXIMA), self._next() or UNPLANNED)
        return returned

    def _next(self) -> PlannedLayout | None:
        number, self._calls = self._calls, self._calls + 1
        return self._layouts[number] if number < len(self._layouts) else None

    def _measure(self, call: AttentionCall, planned: PlannedLayout) -> None:
        call = call._replace(attends_itself=planned.attends_itself)
        self._is_busy = True
        try:
            for kind, tensors in self._probes:
                kind.at_call(call, tensors, self._calls - 1)
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
        return self._open[-1].at_sdpa(args, kwargs)


FRAMES = _Frames()


class _FunctionMode(TorchFunctionMode):
    """Intercept the attention functions that a traced graph calls."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self._frame = frame

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is SDPA and FRAMES.innermost is self._frame:
            return self._frame.at_sdpa(args, kwargs or {})
        if str(function) == "flex_attention" and FRAMES.innermost is self._frame:  # its import loads the compiler
            return self._frame.at_flex(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


class _SoftmaxMode(DispatchMode):  # type: ignore[misc]  # torch's own, untyped
    """Follow the tensors computed from a product, up to the next product, and report every softmax of them."""

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
