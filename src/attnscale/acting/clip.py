"""QK-Clip: where a head's largest score passed a threshold, its queries and keys are scaled down to meet it.

Kimi Team, Kimi K2, 2025. The gradient is not touched, so it is called after the optimiser's step.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from attnscale.acting.folding import Folding, Head, Left
from attnscale.acting.freshness import fresh_maxima, note_changed
from attnscale.acting.writing import Touched, is_sharded
from attnscale.errors import SettingError
from attnscale.tracing.parameters import UntraceableError
from attnscale.watching.layer import Layer

LOGGER = logging.getLogger(__name__)
# A clipped head aims below the threshold by what rounding its parameters may add to a score.
ROUNDING = 1e-5
STALE = "it was clipped since it was measured, and waits to be measured again"


@dataclass(frozen=True)
class ClippedHead:
    """A head whose scores were multiplied by `gamma`.

    `maximum` was its largest score before: "exact" over every row, "sampled" over some (so `bound`, above which no
    score can lie, may be higher), or "bound" that bound itself. At or below the threshold it was clipped with a head
    that shares the gain of its QK-norm.
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
        return f"{self.layer}, head {self.head}: largest score {self.maximum:.4g}{how}, times {self.gamma:.4g}"


@dataclass(frozen=True)
class ClipReport:
    """What was clipped, by how much and where; and the heads over the threshold that could not be."""

    threshold: float
    heads: tuple[ClippedHead, ...]
    left: tuple[Left, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON takes it."""
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
    """What watch() or a Monitor saw of a model."""

    @property
    def layers(self) -> Mapping[str, Layer]:
        """The attentions by module path."""
        ...


def clip_qk_(
    model: nn.Module,
    seen: Watched,
    threshold: float = 100.0,
    *,
    by_bound: bool = False,
    group: "dist.ProcessGroup | None" = None,
) -> ClipReport:
    """Scale down, in place, every head whose largest score in `seen` passed the threshold: γ = threshold / maximum.

    Queries and keys take √γ each: rows of weights and biases, or of a QK-norm's gain, which then stands for the
    weight. Where heads share a key, as in GQA, MQA and the rotary part of MLA, their queries take γ and the key stays.
    A head at or under the threshold keeps its parameters to the last bit, unless it shares the gain that makes its
    queries with one that is over. A head seen NaN or infinite is left, as is one whose parameters could not be
    followed; the report says so, and every clipped head is logged with its maximum before.

    Where rows were sampled, the largest score seen decides; `by_bound` decides by the upper bound instead, after which
    no score of that input can pass the threshold, though a head may be clipped that did not need it. What was measured
    clips once: given again, as by a monitor between its sampled steps, it leaves the heads it clipped. Ranks that hold
    the same parameters must agree: under FSDP2 and DDP they do, else give their `group`.

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
    if not (isinstance(threshold, int | float) and 0 < threshold < math.inf):
        raise SettingError(f"Expected threshold as a positive, finite number, got {threshold!r}.")
    layers = seen.layers
    groups = _groups(model, layers) if group is None else [group]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    own = {name: fresh_maxima(layer, parameters) for name, layer in layers.items()}
    largest = _agreed(model, own, groups)
    asked = {
        (name, head): (float(largest[name][1 if by_bound else 0, head]), layer)
        for name, layer in layers.items()
        for head in range(layer.heads)
    }
    over = {head: known for head, known in asked.items() if not known[0] <= threshold}
    left = [
        Left(name, head, STALE)
        for (name, head), (maximum, layer) in asked.items()
        if maximum == -math.inf
        and not float((layer.stats.max_bound if by_bound else layer.stats.max)[head]) <= threshold
    ]
    if not over:
        return ClipReport(threshold, (), tuple(left))
    folding = Folding(model, layers)
    wanted: dict[Head, float] = {}
    for head, (maximum, layer) in over.items():
        aim = threshold * (1 - max(ROUNDING, torch.finfo(folding.dtype(layer.name)).eps))
        if layer.sinks is not None and float(layer.sinks[head[1]]) > aim:
            left.append(Left(*head, f"a sink beside its keys has the score {float(layer.sinks[head[1]]):.4g}"))
            continue
        try:
            wanted[head] = gamma(maximum, aim, layer.highest_bias, layer.softcap)
        except SettingError as error:
            left.append(Left(*head, str(error)))
    folded, not_folded = folding.multiply_(wanted, merge=min)
    clipped = []
    for each in folded:
        maximum, layer = asked[each.layer, each.head]
        measured = "exact" if layer.stats.exact else "bound" if by_bound else "sampled"
        bound = float(largest[each.layer][1, each.head])
        note_changed(layer, each.head, (parameters[touched.parameter] for touched in each.touched))
        clipped.append(ClippedHead(each.layer, each.head, maximum, bound, measured, each.factor, each.touched))
    report = ClipReport(threshold, tuple(clipped), (*left, *not_folded))
    _log(report)
    return report


def gamma(maximum: float, threshold: float, bias: float = 0.0, softcap: float | None = None) -> float:
    """What to multiply q·k by so that the largest score comes down to the threshold; 1 where it is not above.

    Of scores to which up to `bias` is added, only the rest can be scaled: γ = (τ − b) / (M − b). Under a soft-cap c
    the score before it counts: γ = artanh(τ/c) / artanh(M/c).

    >>> gamma(400.0, 100.0), gamma(-3.0, 100.0), gamma(110.0, 100.0, bias=90.0)
    (0.25, 1.0, 0.5)
    """
    if maximum <= threshold:
        return 1.0
    if not math.isfinite(maximum):
        raise SettingError(f"its largest score is {maximum}")
    if bias >= threshold:
        raise SettingError(f"what is added to its scores, up to {bias:.4g}, passes the threshold alone")
    above, aim = maximum - bias, threshold - bias
    if softcap is not None:
        if above >= softcap:
            raise SettingError(f"its largest score is the soft-cap, {softcap:.4g}, and what came before is not known")
        above, aim = math.atanh(above / softcap), math.atanh(aim / softcap)
    return aim / above


def _agreed(
    model: nn.Module, maxima: Mapping[str, torch.Tensor], groups: "Sequence[dist.ProcessGroup]"
) -> dict[str, torch.Tensor]:
    """The largest over all ranks that hold the same parameters; they ran the same layers."""
    if not groups or not maxima:
        return dict(maxima)
    device = next(model.parameters()).device
    packed = torch.cat([values.flatten() for values in maxima.values()]).to(device)
    packed = torch.where(packed.isnan(), math.inf, packed)  # a NaN on one rank is not to be lost in a maximum
    for each in groups:
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=each)
    parts = packed.cpu().split([values.numel() for values in maxima.values()])
    return {name: part.view_as(values) for part, (name, values) in zip(parts, maxima.items(), strict=True)}


def _groups(model: nn.Module, layers: Mapping[str, Layer]) -> "list[dist.ProcessGroup]":
    """The ranks over which a model's parameters are sharded or copied, but not those with heads of their own.

    Where heads are shared out (tensor parallel), that is the last axis of the mesh, as torch lays them out.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return [model.process_group]
    sharded: Any = next(filter(is_sharded, model.parameters()), None)
    mesh = None if sharded is None else sharded.device_mesh
    if mesh is None:
        return []
    return [mesh.get_group(axis) for axis in range(mesh.ndim - _shares_out_heads(model, layers))]


def _shares_out_heads(model: nn.Module, layers: Mapping[str, Layer]) -> bool:
    """Whether this rank made its queries by its own part of a parameter."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for origin in (call.query for layer in layers.values() for call in layer.origins):
        try:
            sources = () if origin is None else origin.sources()
        except UntraceableError:
            continue
        for source in sources:
            parameter = parameters.get(source.parameter)
            if parameter is not None and is_sharded(parameter) and tuple(parameter.shape) != source.shape:
                return True
    return False


def _log(report: ClipReport) -> None:
    for head in report.heads:
        LOGGER.info("QK-Clip at %g: %s", report.threshold, head)
    for left in report.left:
        LOGGER.log(
            logging.DEBUG if left.reason == STALE else logging.WARNING, "QK-Clip at %g: %s", report.threshold, left
        )
