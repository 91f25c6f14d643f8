"""Judge each head by the spread of its scores, confirmed by its measured entropy.

Over n visible keys the critical spread is √(2 ln n). Only the spread within rows counts, because softmax ignores a
shift of a row. Keys without weight raise the spread too, so a head is `sharp` only if its measured entropy is as low as
theory predicts.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from attnscale.diagnose.finding import Finding, severity_rank
from attnscale.measure.uncertainty import NORMAL
from attnscale.theory.gaussian import expected_softmax
from attnscale.theory.limits import CRITICAL_MARGIN, critical_spread, regime
from attnscale.watching.layer import Layer

# A head is not sharp if its entropy exceeds that at the edge of sharpness by this factor.
CONFIRMED = 1.25
NO_KEYS = "no keys"  # a layer that ran, but no row saw a key


@dataclass(frozen=True)
class Verdict:
    """Verdict on one head, with its numbers."""

    layer: str
    head: int
    verdict: str  # "diluted", "healthy", "sharp", "non_finite", or "uncertain" if the error allows several
    spread: float  # standard deviation of the scores about their row mean
    keys: float  # mean number of visible keys per row
    critical_spread: float
    entropy_ratio: float
    top1: float
    jacobian_trace: float
    spread_error: float  # half width of the 95% interval; 0 if all rows were measured
    gain_error: float  # half width for jacobian_trace

    @property
    def is_past_critical_spread(self) -> bool:
        """True if the spread exceeds the critical spread, and the entropy is as low as theory predicts."""
        return self.verdict == "sharp" and self.spread - self.spread_error > self.critical_spread


def head_verdicts(layer: Layer) -> list[Verdict]:
    """Return the verdict on every head with visible keys."""
    stats = layer.stats
    columns = torch.stack([stats.keys, stats.std_within_rows, stats.entropy_ratio, stats.top1, stats.jacobian_trace])
    errors = torch.stack(
        [NORMAL * stats.stderr(name) for name in ("std_within_rows", "entropy_ratio", "jacobian_trace")]
    )
    return [
        _verdict(layer.name, head, columns[:, head].tolist(), errors[:, head].tolist())
        for head, rows in enumerate(stats.rows.tolist())
        if rows > 0
    ]


def verdict_word(layer: Layer, findings: Iterable[Finding]) -> str:
    """Return one word for a layer: the code of its worst warning or error, else the worst verdict of its heads.

    A layer is `diluted` only if all of its heads are.
    """
    found = {head.verdict for head in head_verdicts(layer)} or {NO_KEYS}
    worst = next((verdict for verdict in ("non_finite", "sharp", "uncertain") if verdict in found), "healthy")
    return worst_code(layer.name, findings) or (worst if len(found) > 1 else found.pop())


def verdict_text(layer: Layer, findings: Iterable[Finding], trained: bool) -> str:
    """Return the verdict on a layer with its number of heads; `healthy` if sharp heads are normal.

    Sharp heads of a trained model are normal unless a finding reports them.
    """
    findings = list(findings)
    word, heads = verdict_word(layer, findings), head_verdicts(layer)
    about = sum(head.verdict == word for head in heads)
    part = f"{about} of {len(heads)} heads" if 0 < about < len(heads) else ""
    if word == "sharp" and trained and worst_code(layer.name, findings) is None:
        return f"healthy ({part} sharp)" if part else "healthy (sharp)"
    return f"{word} ({part})" if part else word


def worst_code(layer: str, findings: Iterable[Finding]) -> str | None:
    """Return the code of the worst warning or error about the layer of this name; None if there is none."""
    about = [each for each in findings if each.layer == layer and each.severity != "note"]
    return max(about, key=lambda each: severity_rank(each.severity)).code if about else None


def _verdict(layer: str, head: int, numbers: list[float], errors: list[float]) -> Verdict:
    (keys, spread, entropy_ratio, top1, jacobian_trace), (spread_error, entropy_error, gain_error) = numbers, errors
    critical = critical_spread(max(1, round(keys)))
    if not all(map(math.isfinite, (spread, top1, jacobian_trace))):
        found = "non_finite"
    elif round(keys) < 2:
        found = "healthy"  # a single key always gets all the weight
    elif math.isnan(spread_error) or math.isnan(entropy_error):
        found = "uncertain"  # the error is unknown
    else:
        ends = (
            (spread - spread_error, entropy_ratio + entropy_error),
            (spread + spread_error, entropy_ratio - entropy_error),
        )
        possible = {_confirmed_regime(*end, round(keys)) for end in ends}
        found = possible.pop() if len(possible) == 1 else "uncertain"
    return Verdict(
        layer, head, found, spread, keys, critical, entropy_ratio, top1, jacobian_trace, spread_error, gain_error
    )


def _confirmed_regime(spread: float, entropy_ratio: float, keys: int) -> str:
    """Return the regime of a spread; `sharp` only if the entropy is as low as theory predicts."""
    found = regime(spread, keys)
    return "healthy" if found == "sharp" and entropy_ratio > CONFIRMED * _edge_of_sharpness(keys) else found


def _edge_of_sharpness(keys: int) -> float:
    """Return the entropy ratio at the smallest spread that regime() calls `sharp`."""
    return expected_softmax(CRITICAL_MARGIN * critical_spread(keys), keys).entropy_ratio
