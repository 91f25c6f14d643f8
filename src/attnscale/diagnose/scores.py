"""Find problems in the scores themselves: `non_finite`, `exploding`, `sharp`, `diluted`, `qk_norm_freezes`.

- At initialisation a sharp head is a warning, because training did not cause it. A layer is an error if all of its
  heads are sharp and hardly any gradient passes.
- In a trained model a sharp head is a note: induction, previous-token and first-token heads need sharp rows. After a
  backward pass it is a warning if hardly any gradient reached the queries and keys of the head.
- `diluted` concerns only the multiplier. Attention of small random weights is nearly uniform, and the model learns all
  the same. So `diluted` is reported only if the right multiplier would give a larger spread. For normalised queries
  and keys, the spread that the multiplier gives to random directions decides.
- QK-Clip acts above 100, loss deteriorates above 1,000, and every run above 10,000 diverged. The height of a score
  above the mean of its row counts, because softmax ignores a shift of the whole row.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from attnscale.diagnose.cause import Cause, cause
from attnscale.diagnose.finding import Finding, layer_finding
from attnscale.diagnose.pattern import pattern_of
from attnscale.diagnose.scale import is_chosen, is_cosine
from attnscale.diagnose.verdict import Verdict, head_verdicts
from attnscale.plain import readable
from attnscale.theory.limits import DILUTED_SPREAD, critical_spread
from attnscale.watching.layer import Layer

# Share of the gradient that uniform weights pass. Published initialisations exceed it: cosine attention starts at
# 10 cos θ (Swin-v2), which over 13 keys of a narrow head is past the critical spread and passes 0.43 of the gradient.
STOPS_GRADIENT = 0.25
# The critical spread holds for many keys. With few keys, one often gets nearly all weight by chance: rows of few keys
# are judged only by a vanishing gradient, and rows of still fewer keys not at all.
MANY_KEYS, FEW_KEYS = 8, 4
DEAD_GAIN = 0.05  # a layer that passes a smaller share of the gradient does not learn its queries and keys
UNREACHED = 1e-3  # gradient relative to the median head; the sharpest head of rxnfp's BERT gets 0.015
# (largest score, severity, published result), worst first.
EXPLODING = (
    (1e4, "error", "every run that passed 10,000 diverged (Wortsman et al. 2023)"),
    (1e3, "warning", "loss deteriorates from about 1,000 on (Wortsman et al. 2023)"),
    (1e2, "note", "QK-Clip would act from 100 on (Kimi K2)"),
)
SHIFTED = "the rest is a shift of the whole row, which softmax ignores"
USE_FLOAT32 = "Compute such scores in float32, or subtract the mean of the keys, which leaves the weights as they are."
BOUND_SCORES = "Add a QK-norm or a soft-cap, or clip the projections (QK-Clip at 100)."
CLIP_PROJECTIONS = "Clip the projections (clip_qk_, at 100) before you train on, and lower the learning rate."
PUBLISHED_COSINE = 20.0  # cosine attention starts at 10 (Swin v2) or log₂(n² − n), and learns from there
UNIFORM_BOUND = 1.05  # bound on the scores below which no key can get more than about e² times the weight of another
SAME_ONE = 0.02


def score_findings(layer: Layer, trained: bool, gradient_share: Tensor | None = None) -> Iterator[Finding]:
    """Find problems in the scores, by head, or once for the whole layer.

    `gradient_share` has one value per head: the layer's entry in gradient_shares().
    """
    heads = head_verdicts(layer)
    broken = sum(head.verdict == "non_finite" for head in heads)
    if broken:
        message = f"{broken} of {layer.heads} heads have scores that are NaN or infinite."
        advice = "Look for NaN in the weights or the input, or for float16 overflowing above 65,504."
        yield layer_finding(layer, "non_finite", message, advice, severity="error")
        return
    yield from _exploding(layer, trained)
    if not layer.wiring.mixes_along_softmax:
        return  # the measured rows are not the normalised ones
    sharp = [head for head in heads if _stops_gradient(head)]
    yield from _sharp_when_trained(layer, sharp, gradient_share) if trained else _sharp_from_start(layer, sharp, heads)
    yield from _diluted(layer, heads, trained)


def critical_spread_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Find normalised queries and keys with a multiplier that takes them past the critical spread at initialisation.

    In a trained model, report it only if the scale is missing and the norms do not compensate. A declared scale is not
    reported. Both the spread of random directions, |a| ‖q‖ ‖k‖ / √d_k, and the measured spread must exceed √(2 ln n).
    """
    keys, scale = float(layer.stats.keys.nanmean()), abs(layer.scale_applied)
    if not layer.wiring.normalised or layer.reading.unread or not keys >= MANY_KEYS:  # NaN: no row sees any
        return
    is_left_out = math.isclose(scale, 1.0, rel_tol=SAME_ONE) and not layer.reading.learned_factor
    if is_chosen(layer, layer.scale_applied) or (trained and not is_left_out):
        return  # learned gains can have any size
    norms, measured = _lengths(layer), float(layer.stats.std_within_rows.nanmean())
    spread, critical = scale * norms * layer.head_dim**-0.5, critical_spread(round(keys))
    if not (is_cosine(layer) and scale <= PUBLISHED_COSINE) and min(spread, measured) > critical:
        yield layer_finding(
            layer,
            "qk_norm_freezes",
            f"The scale of normalised queries and keys is too large, {scale:.3g}: scores of random directions spread "
            f"by {spread:.3g} over {keys:.0f} keys (critical spread {critical:.3g}).",
            f"Start at {layer.head_dim**0.5 / max(norms, 1e-300):.3g}, which gives a spread of one.",
            (spread, critical),
            "note" if layer.declared.scale_of_one else "warning",
        )


def gradient_shares(layers: Mapping[str, Layer]) -> dict[str, Tensor]:
    """Return the gradient of each layer's heads relative to the model's median head; empty without a backward pass.

    Softmax passes the share 1 − Σp² of the gradient. The gradient that reaches a head also depends on its values and on
    the layers above, so a sharp head may get the largest. The gradients of queries and keys are combined by their
    geometric mean, which does not change if a factor moves from one to the other. Layers without both are skipped.
    """
    lengths = {
        name: (query.double() * key.double()).sqrt().cpu()
        for name, layer in layers.items()
        if (query := layer.query_gradient) is not None and (key := layer.key_gradient) is not None
    }
    median = torch.cat(list(lengths.values())).median() if lengths else torch.tensor(0.0)
    return {name: length / median for name, length in lengths.items()} if median > 0 else {}


def threshold_reached(score: float) -> tuple[float, str, str] | None:
    """Return the entry of EXPLODING with the highest threshold that a score reaches; None if it reaches none."""
    return next((threshold for threshold in EXPLODING if score >= threshold[0]), None)


def _stops_gradient(head: Verdict) -> bool:
    if not head.is_past_critical_spread or head.keys < FEW_KEYS:
        return False
    share = STOPS_GRADIENT if head.keys >= MANY_KEYS else DEAD_GAIN
    return head.jacobian_trace + head.gain_error < share * (1 - 1 / head.keys)


def _exploding(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Judge the largest score by its height above the row mean, if that is smaller than the score itself."""
    stats = layer.stats
    effective, head = (float(found) for found in torch.minimum(stats.max, stats.max_above_mean).nan_to_num(0.0).max(0))
    reached = threshold_reached(effective)
    head = int(head) if reached is not None else int(stats.max.nan_to_num(0.0).argmax())
    largest, above_mean = float(stats.max[head]), float(stats.max_above_mean[head])
    by_itself = threshold_reached(largest)
    if by_itself is None:
        return
    _, severity, published = reached or (0.0, "note", SHIFTED)
    advice = USE_FLOAT32 if reached is None else CLIP_PROJECTIONS if trained else BOUND_SCORES
    of_row = "" if reached == by_itself else f", and {readable(above_mean, 4)} above the mean of its row"
    bound = readable(float(stats.max_bound.max()), 4)
    bracket = "" if stats.exact else f" among the rows measured (at most {bound} in all)"
    message = (
        f"{cause(layer, head).sentence} The largest score is {readable(largest, 4)}{bracket}{of_row}; {published}."
    )
    yield Finding(layer.name, head, "exploding", severity, message, largest, EXPLODING[-1][0], advice)


def _sharp_from_start(layer: Layer, sharp: list[Verdict], heads: list[Verdict]) -> Iterator[Finding]:
    """Report sharp heads at initialisation; one finding if all heads are sharp."""
    are_all, severity = bool(sharp) and len(sharp) == len(heads), "warning"
    if are_all and fmean(head.jacobian_trace for head in heads) < DEAD_GAIN:
        severity = "error"
    if layer.wiring.normalised and (layer.declared.scale_of_one or is_chosen(layer, layer.scale_applied)):
        severity = "note"  # it does not depend on the weights, so it is intended
    for found in [sharp] if are_all else [[head] for head in sharp]:
        why = cause(layer, None if are_all else found[0].head)
        start = f"{why.sentence} {'All heads are' if are_all else 'The head is'} sharp"
        yield _sharp_finding(layer, found, None if are_all else found[0].head, severity, start, _advice(layer, why))


def _sharp_when_trained(layer: Layer, sharp: list[Verdict], gradient_share: Tensor | None) -> Iterator[Finding]:
    """Report sharp heads of a trained model."""
    for head in sharp:
        share = math.nan if gradient_share is None else float(gradient_share[head.head])
        of_median = f"its queries and keys get {share:.2g} of the gradient of the median head"
        if math.isnan(share):
            advice = "A backward pass shows if it still learns: audit(…, loss=…), or a Monitor."
        elif share < UNREACHED:
            advice = f"It hardly learns: {of_median}. Clip it (clip_qk_) if it should learn."
        else:
            advice = f"It learns: {of_median}."
        pattern, severity = pattern_of(layer, head.head), "warning" if share < UNREACHED else "note"
        start = "The head is sharp" if pattern is None else f"The head is sharp ({pattern})"
        yield _sharp_finding(layer, [head], head.head, severity, start, advice)


def _sharp_finding(
    layer: Layer, heads: Sequence[Verdict], head: int | None, severity: str, start: str, advice: str
) -> Finding:
    """Return a finding about one head, or about the means of all heads."""
    numbers = ("spread", "keys", "critical_spread", "entropy_ratio", "top1", "jacobian_trace")
    spread, keys, critical, entropy, top1, trace = (fmean(getattr(each, name) for each in heads) for name in numbers)
    message = (
        f"{start}: scores spread by {readable(spread)} over {keys:.0f} keys (critical spread {critical:.3g}), mean row "
        f"entropy is {100 * entropy:.2g}% of its maximum, mean top-1 weight {top1:.2f}, 1 − Σp² {trace:.2g}."
    )
    return Finding(layer.name, head, "sharp", severity, message, spread, critical, advice)


def _advice(layer: Layer, why: Cause) -> str:
    return {
        "multiplier": f"Multiply the scores by {layer.scale_expected:.3g}.",
        "norms": "Initialise the projections smaller, normalise their input, or add a QK-norm.",
        "alignment": "Look for query and key projections that share weights or inputs that are all alike.",
    }[why.factor]


def _diluted(layer: Layer, heads: list[Verdict], trained: bool) -> Iterator[Finding]:
    bound = abs(layer.scale_applied) * _lengths(layer)
    is_bounded = layer.wiring.normalised and 0 < bound <= UNIFORM_BOUND and not layer.reading.learned_factor
    if layer.reading.unread or is_chosen(layer, layer.scale_applied):
        return
    if trained and layer.wiring.normalised and not is_bounded:  # learned gains spread the scores, too
        return
    diluted = [head for head in heads if head.verdict == "diluted" and _multiplier_dilutes(layer, head)]
    blamed = heads if is_bounded else diluted
    if not blamed or len(blamed) < len(heads) / 2:
        return  # a wrong multiplier dilutes most heads of a layer
    scale, expected = layer.scale_applied, _better_multiplier(layer)
    spread, entropy = fmean(head.spread for head in blamed), min(head.entropy_ratio for head in blamed)
    yield layer_finding(
        layer,
        "diluted",
        f"The scale is too small, {scale:.3g}: scores spread by only {spread:.2g}, and all keys get nearly the same "
        f"weight (row entropy at least {100 * entropy:.1f}% of its maximum).",
        f"Multiply the scores by {expected:.3g}, which spreads them by {spread * expected / abs(scale):.2g}.",
        (spread, DILUTED_SPREAD),
        "note" if trained and not is_bounded else "warning",
    )


def _multiplier_dilutes(layer: Layer, head: Verdict) -> bool:
    scale = abs(float(layer.scales[head.head]))
    if not 0 < scale < _better_multiplier(layer):
        return False
    if layer.wiring.normalised:
        norms = float(layer.query_norm[head.head] * layer.key_norm[head.head])
        return scale * norms / math.sqrt(layer.head_dim) < DILUTED_SPREAD
    return head.spread * _better_multiplier(layer) / scale >= DILUTED_SPREAD


def _better_multiplier(layer: Layer) -> float:
    """Return the right multiplier; for normalised vectors, the one that gives random directions a spread of one."""
    if not layer.wiring.normalised:
        return abs(layer.scale_expected)
    return math.sqrt(layer.head_dim) / max(_lengths(layer), 1e-300)


def _lengths(layer: Layer) -> float:
    """Return the mean of ‖q‖‖k‖ over heads."""
    return float((layer.query_norm.double() * layer.key_norm.double()).nanmean())
