"""QK-Clip: scale down the queries and keys of every head whose largest score exceeds a threshold.

Kimi Team, Kimi K2, 2025. It changes weights, not gradients, so call it after the optimiser's step.
"""

import logging
import math
import re
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from attnscale.acting.clip_state import WriteCheck, clip_state
from attnscale.acting.head_rows import HeadRows, SkippedHead, Touched
from attnscale.acting.parameters import Frozen, check_frozen, refuse_foreign_parameters
from attnscale.acting.replicas import Axis, Floats, LayerHeads, agreed_layers, axes_of, head_axes
from attnscale.acting.scaling import FIXED, HeadScaler
from attnscale.errors import NotFollowedWarning, SettingError
from attnscale.plain import printable
from attnscale.results import Result
from attnscale.tracing.parameters import Origins
from attnscale.watching.layer import Layer

LOGGER = logging.getLogger(__name__)
# A head is clipped to slightly below the threshold, because rounding its parameters may increase a score.
ROUNDING = 1e-5
STALE = "it was clipped after this measurement; measure it again"
WAITS = "its weights were scaled down a lot, so it is clipped again only after its next scores"
NO_EFFECT = "its scores did not follow when its weights were scaled"
UNDONE = "the next optimiser step undoes its clips"
NUMBER = re.compile(r"-?\d[\d.e+-]*")  # removed from reasons, to log each reason once
MAXIMUM, BOUND, ADDED, SINK = range(4)  # rows of the numbers of each head


@dataclass(frozen=True)
class ClippedHead:
    """A head whose scores were multiplied by `gamma`.

    `maximum` was its largest score before: "exact" over every row, or "sampled" over some rows, with the upper bound
    `bound`. If `maximum` is within the threshold, the head was clipped because it shares the gain of its QK-norm with
    a head that exceeded it.
    """

    layer: str
    head: int
    maximum: float
    bound: float
    measured: str
    gamma: float
    touched: tuple[Touched, ...]

    def __str__(self) -> str:
        how = "" if self.measured == "exact" else f" ({self.measured}, at most {self.bound:.4g})"
        text = f"{self.layer}, head {self.head}: largest score {self.maximum:.4g}{how}, times {self.gamma:.4g}"
        return printable(text)


@dataclass(frozen=True, repr=False)
class ClipReport(Result):
    """Clipped heads with factor and parameters, and the heads over the threshold that could not be clipped."""

    threshold: float
    heads: tuple[ClippedHead, ...]
    left: tuple[SkippedHead, ...]

    @property
    def factors(self) -> list[tuple[str, int, float]]:
        """Factor of the scores, by layer and head."""
        return [(head.layer, head.head, head.gamma) for head in self.heads]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{len(self.heads)} head{'s' * (len(self.heads) != 1)} clipped to {self.threshold:g}"
            + (":" if self.heads else "")
        ]
        for head in self.heads:
            lines += [f"  {head}", *(f"    {touched}" for touched in head.touched)]
        return "\n".join([*lines, *(f"  {left}" for left in self.left)])


class Watched(Protocol):
    """Measured attentions of a model, as returned by watch() or a Monitor."""

    @property
    def layers(self) -> Mapping[str, Layer]:
        """The attentions by module path."""
        ...


def clip_qk_(
    model: nn.Module,
    seen: Watched,
    threshold: float = 100.0,
    *,
    frozen: Frozen = "keep",
    group: "dist.ProcessGroup | None" = None,
) -> ClipReport:
    """Scale down, in place, every head whose largest score in `seen` exceeds the threshold: γ = threshold / maximum.

    Queries and keys are multiplied by √γ each, through rows of weights and biases, or of the gain of a QK-norm. If
    heads share a key, as in GQA, MQA and the rotary part of MLA, only their queries are multiplied, by γ. The
    parameters of a head within the threshold do not change by a single bit, unless it shares the gain of its queries
    with a head above it. A head is skipped if its scores are NaN or infinite, or if its parameters could not be traced.
    The report names skipped heads, and every clipped head is logged with its previous maximum.

    Parameters with requires_grad=False are not changed, unless `frozen="write"`: a head is skipped if its queries need
    a frozen parameter, as under LoRA.

    If rows were sampled, the largest measured score decides; `rows=None` measures all rows. A measurement clips each
    head once: passed again, as by a monitor between its sampled steps, it skips the heads that it has clipped.

    The scores of a clipped head must decrease accordingly. If they repeatedly do not, the weights of its layer are
    restored, the layer is no longer clipped, and a warning is issued. Until this is verified, a head is scaled down by
    a factor of at most 1,000 in total.

    With torch.distributed, call it on every rank that has the model, even if no attention ran there: parameters shared
    by several ranks stay equal to the last bit. FSDP2, tensor parallel and DDP are detected, also from the module
    inside a wrapper, and in meshes with several axes. For other ranks with copies of the model, pass their `group`.

    >>> from attnscale import watch
    >>> layer = nn.MultiheadAttention(64, 2, batch_first=True)
    >>> with torch.no_grad():
    ...     _ = layer.in_proj_weight[:32].mul_(1000)  # the queries of the first head
    >>> x = torch.randn(1, 10, 64)
    >>> with watch(layer, rows=None) as seen:
    ...     _ = layer(x, x, x)
    >>> [head.head for head in clip_qk_(layer, seen).heads]
    [0]
    >>> with watch(layer, rows=None) as seen:
    ...     _ = layer(x, x, x)
    >>> bool(seen.layers["MultiheadAttention"].stats.max[0] <= 100)
    True
    """
    check_threshold(threshold)
    check_frozen(frozen)
    refuse_foreign_parameters(model)
    axes = head_axes(axes_of(model, group), heads_of(seen.layers))
    return clip_layers(model, seen.layers, threshold, axes, frozen)


def clip_layers(
    model: nn.Module,
    layers: Mapping[str, Layer],
    threshold: float,
    axes: Sequence[Axis],
    frozen: Frozen = "keep",
    check: WriteCheck | None = None,
) -> ClipReport:
    """Clip the heads of these layers by their measured scores; every rank of the axes must call it."""
    state = clip_state(model)
    own = {name: _numbers(layer, state.fresh_maxima(layer)) for name, layer in layers.items()}
    if not axes and all(bool((numbers[MAXIMUM] <= threshold).all()) for numbers in own.values()):
        if check is not None:
            check.forget()
        return ClipReport(threshold, (), tuple(_stale(layers, own, threshold)))
    clipper = Clipper(model, agreed_layers(axes, heads_of(layers)), threshold, axes, frozen, check)
    unknown = torch.full((4, 1), -torch.inf, dtype=torch.float64)
    each = [own[name][:, head, None] if name in own else unknown for name, head in clipper.scaler.heads]
    agreed, votes = clipper.agreed(torch.cat([unknown[:, :0], *each], 1))
    numbers, factors = agreed.cpu(), clipper.clip_(agreed).cpu().numpy()
    clipper.observe(numbers.numpy(), factors, votes.tolist())
    sampled = frozenset(name for name, layer in layers.items() if not layer.stats.exact)
    report = clipper.report(numbers.numpy(), factors, sampled)
    clipper.settle()
    for name, layer in layers.items():
        state.note_used(layer, [head.head for head in report.heads if head.layer == name])
    of_layer = {name: numbers[:, slots] for name, slots in clipper.slots_of_layers().items()}
    stale = _stale({name: layers[name] for name in of_layer if name in layers}, of_layer, threshold)
    return ClipReport(threshold, report.heads, (*stale, *report.left))


def heads_of(layers: Mapping[str, Layer]) -> dict[str, LayerHeads]:
    """Return the heads of each layer, with the origins of their queries, keys and values."""
    return {
        name: LayerHeads(
            layer.heads,
            layer.softcap,
            tuple(
                Origins(*(side and side.resolved() for side in (call.query, call.key, call.value)))
                for call in layer.origins
            ),
        )
        for name, layer in layers.items()
    }


def check_threshold(threshold: float) -> None:
    """Raise SettingError unless the threshold is a positive, finite number."""
    if isinstance(threshold, bool) or not (isinstance(threshold, int | float) and 0 < threshold < math.inf):
        raise SettingError(f"Expected threshold as a positive, finite number, got {threshold!r}.")


def _numbers(layer: Layer, maxima: Tensor) -> Tensor:
    """Return the largest score, its bound, the largest bias and the largest sink, (4, heads); NaN counts as ∞."""
    added = torch.full((layer.heads,), layer.highest_bias, dtype=torch.float64)
    sinks = torch.full_like(added, -math.inf) if layer.sinks is None else layer.sinks.double().cpu().expand(layer.heads)
    numbers = torch.cat([maxima, torch.stack([added, sinks])])
    return numbers.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)


def _stale(layers: Mapping[str, Layer], numbers: Mapping[str, Tensor], threshold: float) -> Iterator[SkippedHead]:
    """Yield heads that exceeded the threshold, but were clipped since then and not measured again."""
    for name, layer in layers.items():
        waiting = (numbers[name][MAXIMUM] == -torch.inf).nonzero().flatten().tolist()
        before = layer.stats.max.tolist() if waiting else []
        yield from (SkippedHead(name, head, STALE) for head in waiting if not before[head] <= threshold)


AIM, SOFTCAP, LAYER = range(3, 6)  # rows of the numbers that ranks exchange, after those of HeadScaler


class Clipper:
    """Clips the heads of a model, on the device of its parameters; every rank of the axes must create one."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, LayerHeads],
        threshold: float,
        axes: Sequence[Axis],
        frozen: Frozen = "keep",
        check: WriteCheck | None = None,
    ) -> None:
        self.threshold, self._state, self._check = threshold, clip_state(model), check

        def known(rows: HeadRows) -> list[list[float]]:
            aims = [_aim(threshold, rows.dtype(name)) for name, _ in rows.heads]
            caps = [layers[name].softcap or math.inf for name, _ in rows.heads]
            return [aims, caps, [float(zlib.crc32(name.encode())) for name, _ in rows.heads]]

        self.scaler = HeadScaler(model, layers, axes, frozen, known)
        self._is_first = all(dist.get_rank(axis.group) == 0 for axis in axes)
        self._effect = self._state.effect_of(self.scaler)
        device = self.scaler.fixed.device
        self.scaler.fixed |= torch.from_numpy(self._effect.stopped).to(device)
        self._no_votes = torch.zeros(2, device=device)
        self._aims, self._caps = (torch.from_numpy(self._known[row]).to(device) for row in (AIM, SOFTCAP))

    @property
    def _known(self) -> Floats:
        return self.scaler.slots.known

    def slots_of_layers(self) -> dict[str, list[int]]:
        """Return the slots of this rank's heads by layer."""
        found: dict[str, list[int]] = {}
        for number, (layer, _) in enumerate(self.scaler.heads, self.scaler.slots.own.start):
            found.setdefault(layer, []).append(number)
        return found

    def agreed(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maximum over ranks of the numbers of each slot, (numbers, slots), and the votes for observe()."""
        votes = None if self._check is None else self._check.votes()
        return self.scaler.slots.agreed(own.to(self._aims), self._no_votes if votes is None else votes)

    def clip_(self, numbers: Tensor) -> Tensor:
        """Scale down the heads above the threshold; return the factor of each slot."""
        factors = self._effect.limited(self.factors(numbers))
        if self._check is not None:
            self._check.before_clip(self.scaler, factors)
        self.scaler.multiply_(factors)
        return factors

    def factors(self, numbers: Tensor) -> Tensor:
        """Return the factor for the scores of each slot, float64; 1 for a head that is not clipped.

        If a bias of up to b is added to the scores, only the product can be scaled: γ = (τ − b) / (M − b). With a
        soft-cap c, the factor applies before the cap: γ = artanh(τ/c) / artanh(M/c).
        """
        largest, has_more = numbers[MAXIMUM], len(numbers) > 1
        added = numbers[ADDED].clamp(min=0.0) if has_more else 0.0
        above, aim = self._uncapped(largest - added), self._uncapped(self._aims - added)
        can = (largest > self.threshold) & torch.isfinite(above) & (aim > 0)
        can = can & (numbers[SINK] <= self._aims) if has_more else can
        return self.scaler.by_family(torch.where(can, aim / above, 1.0), "least")

    def _uncapped(self, scores: Tensor) -> Tensor:
        if not self._is_capped:
            return scores
        caps = self._caps.to(scores.device)
        return torch.where(caps == torch.inf, scores, caps * torch.atanh(scores / caps))

    @cached_property
    def _is_capped(self) -> bool:
        return bool(np.isfinite(self._known[SOFTCAP]).any())

    def observe(self, numbers: Floats, factors: Floats, votes: Sequence[float]) -> None:
        """Check on the host that clips have an effect, else stop clipping; all ranks call it at the same step."""
        if self._check is not None:
            self._check.is_armed |= bool((factors < 1.0).any())
            self._check.is_done |= any(votes)
            if votes[0] and not votes[1]:
                self._stop(np.ones(len(factors), dtype=np.bool_), UNDONE)
        added = np.maximum(numbers[ADDED], 0.0) if len(numbers) > 1 else 0.0
        scores = self._uncapped(torch.from_numpy(numbers[MAXIMUM] - added)).numpy()
        is_free = ~self._effect.stopped & (self._known[FIXED] == 0)
        is_over = (numbers[MAXIMUM] > self.threshold) & np.isfinite(scores) & is_free
        self._effect.observe(scores, is_over, factors)

    def settle(self) -> None:
        """Check the effect of large clips, after all their steps were observed."""
        if self._effect.is_due:
            failed = self._effect.judge(self.scaler)
            if failed.any():
                self._stop(failed, NO_EFFECT)

    @property
    def is_due(self) -> bool:
        """True if settle() has clips to check."""
        return self._effect.is_due

    def _stop(self, slots: NDArray[np.bool_], why: str) -> None:
        self._effect.stopped |= slots
        self.scaler.fixed |= torch.from_numpy(slots).to(self.scaler.fixed.device)
        own = np.flatnonzero(slots[self.scaler.slots.own]).tolist()
        layers = dict.fromkeys(self.scaler.heads[number][0] for number in own)
        self._state.stopped |= dict.fromkeys(layers, why)
        if self._is_first and layers:
            which = ", ".join(layers) if len(layers) < len(self.slots_of_layers()) else "every layer"
            done = "" if why == UNDONE else ", and its weights are restored"
            warnings.warn(printable(f"QK-Clip stops at {which}: {why}{done}."), NotFollowedWarning, stacklevel=4)

    def report(self, numbers: Floats, factors: Floats, sampled: Collection[str] = ()) -> ClipReport:
        """Return the report for this rank's heads, from numbers on the host."""
        scaler, here = self.scaler, self.scaler.slots.own
        own, largest, bounds = factors[here], numbers[MAXIMUM, here], numbers[min(BOUND, len(numbers) - 1), here]
        clipped = []
        for each in scaler.scaled(own):
            number = scaler.rows.number_of[each.layer, each.head]
            how = "sampled" if each.layer in sampled else "exact"
            maximum, bound = float(largest[number]), float(bounds[number])
            clipped.append(ClippedHead(each.layer, each.head, maximum, bound, how, each.factor, each.touched))
        over = np.flatnonzero(~(largest <= self.threshold) & (own == 1.0)).tolist()
        first = scaler.slots.own.start
        left = [SkippedHead(*scaler.heads[at], self._why_left(numbers[:, first + at], at)) for at in over]
        report = ClipReport(self.threshold, tuple(clipped), tuple(left))
        self._state.note(report.factors)
        self._log(report)
        return report

    def _why_left(self, numbers: Floats, number: int) -> str:
        slot = number + self.scaler.slots.own.start
        aim, cap, largest = self._known[AIM, slot], self._known[SOFTCAP, slot], numbers[MAXIMUM]
        added, sink = (max(numbers[ADDED], 0.0), numbers[SINK]) if len(numbers) > 1 else (0.0, -math.inf)
        if sink > aim:
            return f"its sink has a score of {sink:.4g}"
        if not math.isfinite(largest):
            return f"its largest score is {largest}"
        if added >= aim:
            return f"a bias of up to {added:.4g} is added to its scores, which exceeds the threshold by itself"
        if largest - added >= cap:
            return f"its largest score is at the soft-cap, {cap:.4g}, so the score before the cap is unknown"
        if self._effect.stopped[slot]:
            return self._state.stopped.get(self.scaler.heads[number][0], NO_EFFECT)
        return self.scaler.rows.why_fixed(number) if self._known[FIXED, slot] else WAITS

    def _log(self, report: ClipReport) -> None:
        """Log each clipped head with its previous maximum, and once for each layer that could not be clipped."""
        if LOGGER.isEnabledFor(logging.INFO):
            for head in report.heads:
                LOGGER.info("QK-Clip at %g: %s", report.threshold, head)
        for left in report.left:
            said = left.layer, NUMBER.sub("", left.reason)
            if self._is_first and said not in self._state.said and left.reason != WAITS:
                self._state.said.add(said)
                heads = [each.head for each in report.left if (each.layer, each.reason) == (left.layer, left.reason)]
                which = printable(f"{left.layer}, heads {', '.join(map(str, heads))}: not changed: {left.reason}")
                LOGGER.warning("QK-Clip at %g: %s", report.threshold, which)


def _aim(threshold: float, dtype: torch.dtype) -> float:
    """Return the score that a head with parameters of this dtype is clipped to."""
    return threshold * (1 - max(ROUNDING, torch.finfo(dtype).eps))
