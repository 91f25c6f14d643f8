"""QK-Clip: where a head's largest score passed a threshold, its queries and keys are scaled down to meet it.

Kimi Team, Kimi K2, 2025. The gradient is not touched, so it is called after the optimiser's step.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from attnscale.acting.clip_history import fresh_maxima, note_changed, note_taken
from attnscale.acting.folding import Folding, Head, Left
from attnscale.acting.replicas import Maxima, agreed_maxima, axes_of, device_of
from attnscale.acting.writing import Touched
from attnscale.errors import SettingError
from attnscale.plain import printable
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
        told = f"{self.layer}, head {self.head}: largest score {self.maximum:.4g}{how}, times {self.gamma:.4g}"
        return printable(told)


@dataclass(frozen=True)
class ClipReport:
    """What was clipped, by how much and where; and the heads over the threshold that could not be."""

    threshold: float
    heads: tuple[ClippedHead, ...]
    left: tuple[Left, ...]

    @property
    def factors(self) -> list[tuple[str, int, float]]:
        """What the scores of each layer and head were multiplied by."""
        return [(head.layer, head.head, head.gamma) for head in self.heads]

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
    clips once: given again, as by a monitor between its sampled steps, it leaves the heads it clipped.

    Where torch.distributed runs, call it on every rank that holds the model, also on one that saw nothing: what several
    ranks hold stays the same on all to the last bit. FSDP2, tensor parallel and DDP are found, also from the module
    inside a wrapper, and in meshes of several axes; other ranks with copies of the model are told by their `group`.

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
    layers = seen.layers
    axes = axes_of(model, group)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    own = {name: _limits(layer, fresh_maxima(layer, parameters)) for name, layer in layers.items()}
    largest = agreed_maxima(axes, own, device_of(model))
    decides = 1 if by_bound else 0
    asked = {
        (name, head): known
        for name, layer in layers.items()
        for head, known in enumerate(largest[name].T[: layer.heads].tolist())
    }
    over = {head: known for head, known in asked.items() if not known[decides] <= threshold}
    left = list(_stale(layers, largest, threshold, decides))
    if not over and not axes:
        note_taken(model, ())
        return ClipReport(threshold, (), tuple(left))
    folding = Folding(model, layers)
    aims = {name: aim_of(threshold, folding.dtype(name)) for name in layers}
    wanted: dict[Head, float] = {}
    for head, known in over.items():
        maximum, bias, sink, aim = known[decides], known[2], known[3], aims[head[0]]
        if sink > aim:
            left.append(Left(*head, f"a sink beside its keys has the score {sink:.4g}"))
            continue
        try:
            wanted[head] = gamma(maximum, aim, bias, layers[head[0]].softcap)
        except SettingError as error:
            left.append(Left(*head, str(error)))
    folded, not_folded = folding.multiply_(wanted, merge=min, axes=axes)
    clipped = []
    for name, of_layer in groupby(folded, key=lambda each: each.layer):
        layer, changed = layers[name], dict[str, list[int]]()
        measured = "exact" if layer.stats.exact else "bound" if by_bound else "sampled"
        for each in of_layer:
            known = asked[name, each.head]
            for touched in each.touched:
                changed.setdefault(touched.parameter, []).append(each.head)
            clipped.append(ClippedHead(name, each.head, known[decides], known[1], measured, each.factor, each.touched))
        note_changed(layer, ((parameters[parameter], heads) for parameter, heads in changed.items()))
    report = ClipReport(threshold, tuple(clipped), (*left, *not_folded))
    note_taken(model, report.factors)
    log(report)
    return report


def check_threshold(threshold: float) -> None:
    """Refuse what no score can be held to."""
    if isinstance(threshold, bool) or not (isinstance(threshold, int | float) and 0 < threshold < math.inf):
        raise SettingError(f"Expected threshold as a positive, finite number, got {threshold!r}.")


def aim_of(threshold: float, dtype: torch.dtype) -> float:
    """What a head with parameters of this dtype is clipped to."""
    return threshold * (1 - max(ROUNDING, torch.finfo(dtype).eps))


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


def _stale(layers: Mapping[str, Layer], largest: Maxima, threshold: float, decides: int) -> Iterator[Left]:
    """Heads that passed the threshold where they were clipped since, and that nobody measured again."""
    for name, layer in layers.items():
        waiting = np.flatnonzero(largest[name][decides] == -np.inf).tolist()
        before = (layer.stats.max_bound if decides else layer.stats.max).tolist() if waiting else []
        yield from (Left(name, head, STALE) for head in waiting if not before[head] <= threshold)


def _limits(layer: Layer, maxima: torch.Tensor) -> NDArray[np.float64]:
    """The largest score, its bound, the most that is added and the highest sink, (4, heads); NaN counts as ∞."""
    added = torch.full((layer.heads,), layer.highest_bias, dtype=torch.float64)
    sinks = torch.full_like(added, -math.inf) if layer.sinks is None else layer.sinks.double().cpu().expand(layer.heads)
    limits: NDArray[np.float64] = (
        torch.cat([maxima, torch.stack([added, sinks])])
        .nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        .numpy()
    )
    return limits


def log(report: ClipReport) -> None:
    """Each head that was clipped, with its maximum before, and each that could not be."""
    for head in report.heads:
        LOGGER.info("QK-Clip at %g: %s", report.threshold, head)
    for left in report.left:
        LOGGER.log(
            logging.DEBUG if left.reason == STALE else logging.WARNING, "QK-Clip at %g: %s", report.threshold, left
        )
