"""Find the attention calls of a module while it runs, or while the compiler traces it, and hand them to its probes.

Functions that attend are seen by their name in an eager run, and by a torch-function mode while a graph is traced.
Attention that is written out is seen below autograd: a product of activations whose image comes to a softmax.
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

KERNEL = "-"  # in the place of a layout: SDPA computes the call
ROW_MAXIMA = "rows"  # likewise: FlexAttention does, and the scores are the maximum of each row
ITSELF = "="  # before a layout: queries and keys have the same positions
SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class Modification(NamedTuple):
    """FlexAttention's two functions, by their number in MODIFICATIONS, and the tensors that they take."""

    functions: int
    buffers: list[Tensor]  # of the first function, then of the second


# score_mod and mask_mod of each traced call, and how many buffers are of the first; they live as long as any graph may.
MODIFICATIONS: list[tuple[Any, Any, int]] = []


class AttentionCall(NamedTuple):
    """One attention call: query (batch, heads, q_len, d) and key (batch, kv_heads, kv_len, d) of SDPA or FlexAttention.

    Of an attention that is written out, query and key are the two operands of its product, as they lay there.
    """

    query: Tensor
    key: Tensor
    scores: Tensor | None = None  # written out: the input of the softmax
    mask: Tensor | None = None
    hidden_keys: Tensor | None = None  # that the mask hides from every query; a graph computes it once for all layers
    layout: str = KERNEL  # how scores and operands lie
    attends_itself: bool = False  # queries and keys have the same positions
    is_causal: bool = False
    scale: float = 1.0
    modification: Modification | None = None  # of FlexAttention

    def detached(self) -> "AttentionCall":
        """Return it without its operands' gradients."""
        scores = None if self.scores is None else self.scores.detach()
        return self._replace(query=self.query.detach(), key=self.key.detach(), scores=scores)

    @property
    def is_written(self) -> bool:
        """True of an attention that is written out."""
        return self.layout not in (KERNEL, ROW_MAXIMA)

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The fields that are tensors."""
        return self[:5]

    @property
    def constants(self) -> tuple[Any, ...]:
        """Further fields, which a graph holds as constants."""
        return self[5:9]


def read_sdpa(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall | None:
    """Read the arguments of SDPA; None where no probe takes them."""
    given = dict(zip(SDPA_ARGUMENTS, args, strict=False)) | kwargs
    query, key, mask, scale = given["query"], given["key"], given.get("attn_mask"), given.get("scale")
    if query.dim() != 4 or query.is_nested or key.is_nested:
        return None
    return AttentionCall(
        query,
        key,
        mask=mask,
        hidden_keys=None if mask is None else keys_nobody_sees(Visibility.of(mask, is_causal=False).mask),
        is_causal=bool(given.get("is_causal")),
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
    )


def read_flex(given: dict[str, Any]) -> AttentionCall | None:
    """Read the arguments of FlexAttention in a graph that is traced; None where no probe takes them."""
    own, others = given["score_buffers"], given["mask_buffers"]
    if not all(isinstance(buffer, Tensor) for buffer in (*own, *others)):
        return None
    MODIFICATIONS.append((given["score_mod"], given["block_mask"][-1], len(own)))
    modification = Modification(len(MODIFICATIONS) - 1, [buffer.detach() for buffer in (*own, *others)])
    return AttentionCall(given["query"], given["key"], scale=float(given["scale"]), modification=modification)


ProbeTensors = Tensor | tuple[Tensor, ...]  # what a probed module holds for a probe
PRODUCTS = {"bmm": (0, 1), "baddbmm": (1, 2)}  # which arguments are the operands
PROJECTIONS = frozenset(("mm", "addmm", "convolution", "linear"))  # beyond which no product is followed


class ProbeKind:
    """One kind of probe. `tensors` are those that its module holds for it; in a graph, of a subclass of Tensor."""

    def at_entry(self, tensors: Any) -> None:
        """Note that a run of the module begins."""

    def at_call(self, call: AttentionCall, tensors: Any, number: int) -> None:
        """Measure a call; `number` counts those in a run of the module."""

    def at_unplanned_softmax(self, tensors: Any) -> None:
        """Note a softmax beyond those of the plan."""


class PlannedLayout(NamedTuple):
    """Layout of a planned call, for its probes."""

    code: str
    attends_itself: bool


UNPLANNED = PlannedLayout(KERNEL, False)
KINDS: dict[str, ProbeKind] = {}  # by the name that a graph holds as a constant


@lru_cache
def _kinds(names: str) -> tuple[ProbeKind, ...]:
    return tuple(KINDS[name.rstrip("0123456789")] for name in names.split())


def layouts_of(module: ModulePlan) -> str:
    """Return what the planned calls of a module say to their probes, as text: a graph holds it as a constant."""
    codes = (KERNEL if call.written is None else call.written.layout.code for call in module.calls)
    owns = (ITSELF * call.template.attends_itself for call in module.calls)
    return " ".join(map(str.__add__, owns, codes))


@lru_cache
def _split(layouts: str) -> tuple[list[PlannedLayout], bool]:
    """Return the layout of each call that layouts_of() wrote down, and True if one is written out."""
    found = [PlannedLayout(each.removeprefix(ITSELF), each.startswith(ITSELF)) for each in layouts.split()]
    return found, any(each.code != KERNEL for each in found)


class Frame:
    """One run of a probed module: its probes, each with its tensors, and the number of calls so far.

    `layouts` has the layout of each planned call that is written out; without one, none is looked for.
    """

    def __init__(self, names: str, layouts: str, tensors: tuple[ProbeTensors, ...], is_traced: bool) -> None:
        self._probes = list(zip(_kinds(names), tensors, strict=True))
        self._calls, self._is_busy = 0, False
        self._layouts, has_written = _split(layouts)
        self._contexts: list[Any] = [_SoftmaxMode(self)] if has_written else []
        if is_traced:
            self._contexts.append(Redirected(TORCH_NAMES))  # torch functions call SDPA by its name, which no mode sees
        if is_traced or not is_redirected():
            self._contexts.append(_FunctionMode(self))
        for context in self._contexts:
            context.__enter__()
        for kind, own in self._probes:
            kind.at_entry(own)

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
        planned = self._next()
        if planned is None:
            for kind, tensors in self._probes:
                kind.at_unplanned_softmax(tensors)
        elif planned.code != KERNEL and layout_from(planned.code).order[-1] == axis % scores.dim():
            self._measure(AttentionCall(left, right, scores, layout=planned.code), planned)

    def at_sdpa(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure a call of SDPA, then run it.

        Under a torch.func transform it only runs: nothing may be written there that the transform does not know of.
        """
        call = None if self._is_busy or in_transform() else read_sdpa(args, kwargs)
        if call is not None:
            planned = self._next()
            self._measure(call, planned or UNPLANNED)
        return SDPA(*args, **kwargs)

    def at_flex(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run FlexAttention with the maximum of each row, and measure it."""
        given = dict(zip(FLEX_ARGUMENTS, args, strict=False)) | kwargs
        call = None if self._is_busy or in_transform() else read_flex(given)
        if call is None:
            return function(*args, **kwargs)
        given["kernel_options"] = {**given["kernel_options"], "OUTPUT_MAX": True}
        returned = function(*(given[name] for name in FLEX_ARGUMENTS))
        maxima = returned[2].detach() * math.log(2)  # the kernel counts in powers of two
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
    """Sees every function that a traced graph calls."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self._frame = frame

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is SDPA and FRAMES.innermost is self._frame:
            return self._frame.at_sdpa(args, kwargs or {})
        if str(function) == "flex_attention" and FRAMES.innermost is self._frame:  # to import it loads the compiler
            return self._frame.at_flex(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


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
