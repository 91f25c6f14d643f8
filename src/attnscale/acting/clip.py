"""QK-Clip: scale down the queries and keys of every head whose largest score exceeds a threshold.

Kimi Team, Kimi K2, 2025. It changes weights, not gradients, so call it after the optimiser's step.
"""

import logging
import math
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from attnscale.acting.clip_state import WriteCheck, clip_state
from attnscale.acting.head_rows import Floats, Mask, SkippedHead, Touched, report_text
from attnscale.acting.parameters import Frozen, check_frozen, refuse_foreign_parameters
from attnscale.acting.replicas import LayerHeads, Replicas, heads_of, replicas_of
from attnscale.acting.scaling import HeadScaler
from attnscale.errors import NotFollowedWarning, SettingError
from attnscale.plain import printable
from attnscale.results import Result
from attnscale.watching.layer import Layer

LOGGER = logging.getLogger(__name__)
ALREADY_CLIPPED = "it was clipped after this measurement; measure it again"
AT_LIMIT = "its weights were scaled down by the most that is allowed before its next scores show an effect"
NO_EFFECT = "its scores did not decrease when its weights were scaled down"
OVERWRITTEN = "the next optimiser step overwrites the clipped weights"
NUMBER = re.compile(r"-?\d[\d.e+-]*")  # removed from reasons, to log each reason once
MAXIMUM, BOUND, ADDED, SINK = range(4)  # rows of the numbers of each head; QKClip has the first only


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
        return report_text(f"clipped to {self.threshold:g}", self.heads, self.left)


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
    replicas = replicas_of(model, group, seen.layers)
    return clip_layers(model, seen.layers, threshold, replicas, frozen)


def clip_layers(
    model: nn.Module,
    layers: Mapping[str, Layer],
    threshold: float,
    replicas: Replicas,
    frozen: Frozen = "keep",
    check: WriteCheck | None = None,
) -> ClipReport:
    """Clip the heads of these layers by their measured scores; every rank must call it."""
    state = clip_state(model)
    own = {name: _numbers(layer, state.fresh_maxima(layer)) for name, layer in layers.items()}
    stale = [
        SkippedHead(name, head, ALREADY_CLIPPED)
        for name, layer in layers.items()
        for head in (own[name][MAXIMUM] == -torch.inf).nonzero().flatten().tolist()
        if not float(layer.stats.max[head]) <= threshold
    ]
    if not replicas.groups and all(bool((numbers[MAXIMUM] <= threshold).all()) for numbers in own.values()):
        if check is not None:
            check.forget()
        return ClipReport(threshold, (), tuple(stale))
    clipper = Clipper(model, replicas.agreed_layers(heads_of(layers)), threshold, replicas, frozen, check)
    unknown = torch.full((4, 1), -torch.inf, dtype=torch.float64)
    each = [own[name][:, head, None] if name in own else unknown for name, head in clipper.rows.heads]
    agreed = replicas.reduced_(torch.cat([unknown[:, :0], *each], 1).to(clipper.device), "max")
    factors = clipper.clip_(agreed).cpu().numpy()
    clipper.observe(agreed.cpu(), factors)
    sampled = {name for name, layer in layers.items() if not layer.stats.exact}
    report = clipper.report(agreed.cpu(), factors, sampled)
    clipper.restore_if_due()
    for name, layer in layers.items():
        state.note_used(layer, [head.head for head in report.heads if head.layer == name])
    return ClipReport(threshold, report.heads, (*stale, *report.left))


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


class Clipper:
    """Clips the heads of a model, on the device of its parameters; every rank must create one.

    Numbers are tensors (1 or 4, heads), with the rows MAXIMUM, BOUND, ADDED and SINK.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, LayerHeads],
        threshold: float,
        replicas: Replicas,
        frozen: Frozen = "keep",
        check: WriteCheck | None = None,
    ) -> None:
        self.threshold, self._state, self._check = threshold, clip_state(model), check
        self.scaler = HeadScaler(model, layers, frozen, replicas)
        self.rows, self.device, self._is_first = self.scaler.rows, self.scaler.device, replicas.is_first
        self._effect = self._state.effect_of(self.scaler)
        caps = [layers[name].softcap or math.inf for name, _ in self.rows.heads]
        aims_and_caps = torch.from_numpy(np.array([threshold * (1 - self.rows.rounding), caps]))
        self._is_capped = min(caps, default=math.inf) < math.inf
        self._aims_and_caps = {each.type: aims_and_caps.to(each) for each in (torch.device("cpu"), self.device)}
        self._families = torch.from_numpy(self.rows.families).to(self.device)
        self._ones = torch.ones(len(caps), dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def clip_(self, numbers: Tensor) -> Tensor:
        """Scale down the heads above the threshold; return the factor of each head, float64.

        It does not wait for a GPU, except to check once or a few times that the optimiser keeps clipped weights.
        """
        if self._check is not None and self._check.has_sample and self._check.was_undone(self.scaler):
            self._stop(np.ones(len(self.rows.heads), dtype=np.bool_), OVERWRITTEN)
        products, aims = self._products(numbers)
        is_over = (numbers[MAXIMUM] > self.threshold) & (products < torch.inf)
        wanted = torch.where(is_over, aims / products, 1.0)
        factors = torch.scatter_reduce(self._ones, 0, self._families, wanted, "amin")[self._families]
        factors = self._effect.limited(factors)
        if self._check is not None:
            self._check.before_clip(self.scaler, factors)
        self.scaler.multiply_(factors)
        return factors

    def _products(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest product of queries and keys of each head, ∞ if it cannot be scaled, and its aim.

        If a bias of up to b is added to the scores, only the product can be scaled: γ = (τ − b) / (M − b). With a
        soft-cap c, the factor applies before the cap: γ = artanh(τ/c) / artanh(M/c).
        """
        largest, (aims, caps) = numbers[MAXIMUM], self._aims_and_caps[numbers.device.type]
        if len(numbers) > 1:
            added = numbers[ADDED].clamp(min=0.0)
            is_impossible = (added >= aims) | (numbers[SINK] > aims)
            largest, aims = torch.where(is_impossible, torch.inf, largest - added), aims - added
        if self._is_capped:
            largest, aims = (
                torch.where(caps == torch.inf, scores, caps * torch.atanh((scores / caps).clamp(max=1.0)))
                for scores in (largest, aims)
            )
        return largest, aims

    def observe(self, numbers: Tensor, factors: Floats) -> None:
        """Record the scores and factors of a clip on the host; all ranks call it at the same step."""
        if self._check is not None:
            self._check.is_armed |= bool((factors < 1.0).any())
        products, _ = self._products(numbers)
        is_over = (numbers[MAXIMUM] > self.threshold) & products.isfinite()
        self._effect.observe(products.numpy(), is_over.numpy() & ~self._effect.is_fixed, factors)

    @property
    def is_due(self) -> bool:
        """True if restore_if_due() has clips to check."""
        return self._effect.is_due

    def restore_if_due(self) -> None:
        """Check the effect of large clips after all their steps were observed; restore weights if there was none."""
        if self._effect.is_due:
            failed = self._effect.judge(self.scaler)
            if failed.any():
                self._stop(failed, NO_EFFECT)

    def _stop(self, heads: Mask, why: str) -> None:
        self._effect.stop(heads)
        layers = dict.fromkeys(self.rows.heads[number][0] for number in np.flatnonzero(heads))
        self._state.stopped |= dict.fromkeys(layers, why)
        if self._is_first and layers:
            which = ", ".join(layers) if len(layers) < len({name for name, _ in self.rows.heads}) else "every layer"
            done = "; its weights are restored" if why == NO_EFFECT else ""
            warnings.warn(printable(f"QK-Clip stops at {which}: {why}{done}."), NotFollowedWarning, stacklevel=4)

    def report(self, numbers: Tensor, factors: Floats, sampled: Collection[str] = ()) -> ClipReport:
        """Return the report, from numbers on the host."""
        clipped, skipped, of_heads = [], [], numbers.T.tolist()
        for number, touched in self.rows.touched(factors).items():
            (layer, head), (maximum, *more) = self.rows.heads[number], of_heads[number]
            how = "sampled" if layer in sampled else "exact"
            bound, factor = more[0] if more else maximum, float(factors[number])
            clipped.append(ClippedHead(layer, head, maximum, bound, how, factor, touched))
        for number, (layer, head) in enumerate(self.rows.heads):
            if of_heads[number][MAXIMUM] > self.threshold and factors[number] == 1.0:
                skipped.append(SkippedHead(layer, head, self._skip_reason(number, *of_heads[number])))
        report = ClipReport(self.threshold, tuple(clipped), tuple(skipped))
        self._state.note(report.factors)
        self._log(report)
        return report

    def _skip_reason(
        self, number: int, largest: float, bound: float = 0.0, added: float = 0.0, sink: float = -math.inf
    ) -> str:
        (aim, cap), added = self._aims_and_caps["cpu"][:, number].tolist(), max(added, 0.0)
        if sink > aim:
            return f"its sink has a score of {sink:.4g}"
        if not math.isfinite(largest):
            return f"its largest score is {largest}"
        if added >= aim:
            return f"a bias of up to {added:.4g} is added to its scores, which exceeds the threshold by itself"
        if largest - added >= cap:
            return f"its largest score is at the soft-cap, {cap:.4g}, so the score before the cap is unknown"
        if self.rows.is_fixed[number]:
            return self.rows.why_fixed(number)
        return self._state.stopped.get(self.rows.heads[number][0], AT_LIMIT)

    def _log(self, report: ClipReport) -> None:
        """Log each clipped head with its previous maximum, and once for each layer that could not be clipped."""
        if LOGGER.isEnabledFor(logging.INFO):
            for head in report.heads:
                LOGGER.info("QK-Clip at %g: %s", report.threshold, head)
        for left in report.left:
            logged = left.layer, NUMBER.sub("", left.reason)
            if self._is_first and logged not in self._state.logged and left.reason != AT_LIMIT:
                self._state.logged.add(logged)
                heads = [each.head for each in report.left if (each.layer, each.reason) == (left.layer, left.reason)]
                which = printable(f"{left.layer}, heads {', '.join(map(str, heads))}: not changed: {left.reason}")
                LOGGER.warning("QK-Clip at %g: %s", report.threshold, which)
