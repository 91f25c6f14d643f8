"""What is found from the scores themselves: verdicts on heads -> `non_finite`, `exploding`, `saturated`, `diluted`.

- At initialisation a frozen head is a warning: nobody has taught it to be sharp. A layer of which every head is frozen
  and hardly any gradient passes is an error.
- In a trained model it is a note: induction, previous-token and first-token heads are sharp because that is their job.
  Whether such a head still learns is told by the gradient that reached its queries and keys, where a backward pass was
  seen: a warning where next to none did.
- `diluted` accuses the multiplier alone. Small random weights make every small model's attention nearly uniform at
  first, and it learns all the same; so a spread is diluted only where the multiplier the head should have had would
  not have left it so. Normalised queries and keys have no weights to blame: there the spread that the multiplier
  gives to random directions decides.
- A maximum above 100, 1000 and 10,000 is where QK-Clip acts, where loss deteriorates and where every run diverged. It
  is judged above the mean of its row: a shift of the whole row is nothing to softmax.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attnscale.declared import Authority
from attnscale.diagnose.cause import cause
from attnscale.diagnose.finding import Finding
from attnscale.diagnose.habit import habit_of
from attnscale.diagnose.verdict import Verdict, head_verdicts, layer_verdict
from attnscale.plain import readable
from attnscale.theory.limits import DILUTED_SPREAD
from attnscale.watching.layer import Layer

# Of the gradient that uniform weights would pass. Published initialisations stay above it: cosine attention starts at
# 10 cos θ (Swin-v2), which over 13 keys of a narrow head is past the freezing point and passes 0.43 of the gradient.
STOPS_GRADIENT = 0.25
# The freezing point is a law of many keys: of two, one may well take nearly all by chance, and of a few it sometimes
# does. So a few keys are judged by a gradient that is all but gone, and fewer not at all.
MANY_KEYS, FEW_KEYS = 8, 4
DEAD_GAIN = 0.05  # a layer that passes less of the gradient does not learn where to look
UNREACHED = 1e-3  # of the gradient that reaches the median head; the sharpest head of rxnfp's BERT gets 0.015
# (largest score, severity, what is known of it), the worst first.
EXPLODING = (
    (1e4, "error", "every run that passed 10,000 diverged (Wortsman et al. 2023)"),
    (1e3, "warning", "loss deteriorates from about 1,000 on (Wortsman et al. 2023)"),
    (1e2, "note", "QK-Clip would act from 100 on (Kimi K2)"),
)
SHIFTED = "softmax sees no more than that, the rest is a shift of the whole row"
WIDEN_THEM = "Compute such scores in float32; less the mean of its keys, a head has the same weights and no shift."
BOUND_THEM = "Add a QK-norm or a soft-cap, or clip the projections (QK-Clip at 100)."
CLIP_THEM = "Clip the projections (clip_qk_, at 100) before you train it on; a lower learning rate keeps them there."


def verdict_findings(layer: Layer, trained: bool, reached: Tensor | None = None) -> Iterator[Finding]:
    """`non_finite`, `exploding`, `saturated` and `diluted`, by head, or once where the whole layer is meant.

    `reached` is the gradient that came to each head, of that of the model's median head, where a backward was seen.
    """
    heads = head_verdicts(layer)
    broken = [head for head in heads if head.verdict == "non_finite"]
    if broken:
        yield _non_finite(layer, len(broken))
        return
    yield from _exploding(layer, trained)
    if not layer.wiring.mixes_along_softmax:
        return  # the rows measured are not those that were normalised
    frozen = [head for head in heads if _is_frozen(head)]
    yield from _sharp(layer, frozen, reached) if trained else _saturated(layer, frozen, len(heads))
    yield from _diluted(layer, heads, trained)


def _is_frozen(head: Verdict) -> bool:
    """Beyond the freezing point itself, with little of the gradient left."""
    if not head.is_past_freezing or head.keys < FEW_KEYS:
        return False
    share = STOPS_GRADIENT if head.keys >= MANY_KEYS else DEAD_GAIN
    return head.gradient_gain + head.gain_error < share * (1 - 1 / head.keys)


def _non_finite(layer: Layer, broken: int) -> Finding:
    return Finding(
        layer.name,
        None,
        "non_finite",
        "error",
        f"{broken} of {layer.heads} heads have scores that are NaN or infinite.",
        None,
        None,
        "Look for NaN in the weights or the input, or for float16 overflowing above 65,504.",
    )


def threshold_reached(score: float) -> tuple[float, str, str] | None:
    """The highest published threshold that a score has reached, as EXPLODING has it; None below all of them."""
    return next((threshold for threshold in EXPLODING if score >= threshold[0]), None)


def _exploding(layer: Layer, trained: bool) -> Iterator[Finding]:
    """By what softmax sees of the largest score: what it is above the mean of its row, and never more than it is."""
    stats = layer.stats
    felt, head = (float(found) for found in torch.minimum(stats.max, stats.max_above_mean).nan_to_num(0.0).max(0))
    reached = threshold_reached(felt)
    head = int(head) if reached is not None else int(stats.max.nan_to_num(0.0).argmax())
    largest, above = float(stats.max[head]), float(stats.max_above_mean[head])
    by_itself = threshold_reached(largest)
    if by_itself is None:
        return
    _, severity, known = reached or (0.0, "note", SHIFTED)
    mend = WIDEN_THEM if reached is None else CLIP_THEM if trained else BOUND_THEM
    apart = "" if reached == by_itself else f", and {readable(above, 4)} above the mean of its row"
    bound = readable(float(stats.max_bound.max()), 4)
    bracket = "" if stats.exact else f" among the rows looked at (at most {bound} in all)"
    yield Finding(
        layer.name,
        head,
        "exploding",
        severity,
        f"The largest score is {readable(largest, 4)}{bracket}{apart}; {known}.",
        largest,
        EXPLODING[-1][0],
        f"{cause(layer, head).sentence} {mend}",
    )


def _saturated(layer: Layer, frozen: list[Verdict], heads: int) -> Iterator[Finding]:
    """At initialisation, where nobody has taught a head to be sharp."""
    if frozen and len(frozen) == heads:
        whole = layer_verdict(layer)
        assert whole is not None  # it has heads
        severity = "error" if whole.gradient_gain < DEAD_GAIN else "warning"
        yield _saturated_finding(layer, whole, severity, _saturated_advice(layer, None))
        return
    for head in frozen:
        yield _saturated_finding(layer, head, "warning", _saturated_advice(layer, head.head))


def _sharp(layer: Layer, frozen: list[Verdict], reached: Tensor | None) -> Iterator[Finding]:
    """In a trained model, where a head may be sharp on purpose."""
    for head in frozen:
        assert head.head is not None  # of a layer's mean nothing reached
        share = math.nan if reached is None else float(reached[head.head])
        if math.isnan(share):
            told = "Sharp; whether it still learns needs a backward pass: audit(…, loss=…), or a Monitor."
        elif share < UNREACHED:
            told = (
                f"The gradient that reaches its queries and keys is {share:.1g} of that of the median head: it hardly "
                "learns any more. Clip it (clip_qk_), if it should."
            )
        else:
            told = f"Sharp, and it gets {share:.2g} of the gradient that reaches the median head's queries and keys."
        looks_at = f"{found}. " if (found := habit_of(layer, head.head)) is not None else ""
        yield _saturated_finding(layer, head, "warning" if share < UNREACHED else "note", f"{looks_at}{told}")


def _saturated_finding(layer: Layer, found: Verdict, severity: str, advice: str) -> Finding:
    every = "every head is frozen: " if found.head is None else ""
    message = (
        f"{every}the scores spread by {readable(found.spread)} over {found.keys:.0f} keys, where softmax freezes at "
        f"{found.freezing_point:.3g}; entropy is {found.entropy_ratio:.2f} of ln n, top-1 {found.top1:.2f}, and "
        f"the softmax lets {found.gradient_gain:.2f} of the gradient through."
    )
    return Finding(
        layer.name, found.head, "saturated", severity, _sentence(message), found.spread, found.freezing_point, advice
    )


def _saturated_advice(layer: Layer, head: int | None) -> str:
    why = cause(layer, head)
    mend = {
        "multiplier": f"Multiply the scores by {layer.scale_expected:.3g}.",
        "norms": "Initialise the projections smaller, normalise their input, or add a QK-norm.",
        "alignment": "Look for query and key projections that share weights or inputs that are all alike.",
    }
    return f"{why.sentence} {mend[why.factor]}"


def _diluted(layer: Layer, heads: list[Verdict], trained: bool) -> Iterator[Finding]:
    if layer.reading.unread:
        return  # the multiplier cannot be told
    if trained and layer.wiring.normalised:
        return  # the gains were learned, so what spreads the scores so little is not the multiplier alone
    diluted = [head for head in heads if head.verdict == "diluted"]
    blamed = [head for head in diluted if _multiplier_dilutes(layer, head)]
    if not blamed or len(blamed) < len(heads) / 2:
        return  # a multiplier that dilutes does so to most heads
    scale, expected = layer.scale_applied, _better_multiplier(layer)
    spread = math.fsum(head.spread for head in blamed) / len(blamed)
    yield Finding(
        layer.name,
        None,
        "diluted",
        "note" if trained else "warning",
        f"The scores spread by only {spread:.2g}, since they are multiplied by {scale:.3g}: all keys weigh nearly "
        f"the same (entropy {min(head.entropy_ratio for head in blamed):.3f} of ln n).",
        spread,
        DILUTED_SPREAD,
        f"Multiply the scores by {expected:.3g}, which spreads them by {spread * expected / abs(scale):.2g}.",
    )


def _multiplier_dilutes(layer: Layer, head: Verdict) -> bool:
    assert head.head is not None
    scale = abs(float(layer.scales[head.head]))
    if not 0 < scale < _better_multiplier(layer) or _is_chosen(layer, scale):
        return False
    if layer.wiring.normalised:
        norms = float(layer.query_norm[head.head] * layer.key_norm[head.head])
        return scale * norms / math.sqrt(layer.head_dim) < DILUTED_SPREAD
    return head.spread * _better_multiplier(layer) / scale >= DILUTED_SPREAD


def _is_chosen(layer: Layer, scale: float) -> bool:
    said = layer.declared
    is_declared = said.scale is None or math.isclose(scale, abs(said.scale), rel_tol=0.02)
    return said.scale_authority is Authority.CONFIGURED and is_declared


def _better_multiplier(layer: Layer) -> float:
    """What the scores should have been multiplied by: for normalised vectors, what spreads random directions by one."""
    if not layer.wiring.normalised:
        return abs(layer.scale_expected)
    norms = float((layer.query_norm.double() * layer.key_norm.double()).mean())
    return math.sqrt(layer.head_dim) / max(norms, 1e-300)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
