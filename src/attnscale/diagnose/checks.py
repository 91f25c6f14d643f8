"""Check how an attention is wired: masks, soft-caps, norms, dropout, weights, gradients; and list all checks.

A check takes a layer, and if its model is trained, and yields findings. A comparison takes all layers of a model.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnscale.diagnose.finding import Finding, layer_finding, severity_rank
from attnscale.diagnose.scale import scale_error, scale_findings
from attnscale.diagnose.scores import critical_spread_findings, gradient_shares, score_findings, threshold_reached
from attnscale.watching.layer import Layer

SYMPTOMS = ("diluted", "sharp", "exploding", "qk_norm_freezes")  # of a wrong multiplier, where there is one
HIGHEST_USEFUL_CAP = 1e3  # loss deteriorates from scores of about 1,000 on (Wortsman et al. 2023)
OFF_ONE = 0.05  # of the sum of a row: half precision rounds a long row by less
LEARNED_SCALE = re.compile(r"logit_?scale|log_?scale|temperature|^tau$|softmax_scale|^qk_norm_scale$")
SAME_SCALE = 0.01  # relative: a factor that is 1/√d_k
SAME_IN_BOTH_MODES = 0.02  # relative: a slope fitted to scores in half precision


def all_findings(layers: Mapping[str, Layer], trained: bool) -> Iterator[Finding]:
    """Yield all findings about the layers of a model."""
    shares = gradient_shares(layers)
    for name, layer in layers.items():
        yield from findings_of(layer, trained, shares.get(name))
    for compare in COMPARISONS:
        yield from compare(layers, trained)


def findings_of(layer: Layer, trained: bool, gradient_share: Tensor | None = None) -> Iterator[Finding]:
    """Yield all findings about one layer by itself; `gradient_share` as gradient_shares() returns it.

    What follows from a wrong scale that was found is a note, not a second warning or error.
    """
    of_scores = list(score_findings(layer, trained, gradient_share))
    if any(finding.code == "non_finite" for finding in of_scores):
        yield from of_scores
        return  # nothing else can be read from its scores
    of_scale, of_spread = list(scale_findings(layer, trained)), list(critical_spread_findings(layer, trained))
    yield from of_scale
    yield from (as_symptom(finding, of_scale, layer) for finding in of_spread)
    yield from (as_symptom(finding, [*of_scale, *of_spread], layer) for finding in of_scores)
    for check in CHECKS:
        yield from check(layer, trained)


def as_symptom(finding: Finding, causes: Sequence[Finding], layer: Layer) -> Finding:
    """Return the finding with the severity of what is left of it once the multiplier is right.

    `causes` are findings about the multiplier.
    """
    wrong = scale_error(causes) or next((each for each in causes if each.code == "qk_norm_freezes"), None)
    if wrong is None or finding.code not in SYMPTOMS or finding.measured is None or finding.expected is None:
        return finding
    right = 1.0 if wrong.code == "qk_norm_freezes" else wrong.expected  # a norm's advice is a spread of one
    corrected = finding.measured * (abs(right / wrong.measured) if right and wrong.measured else 1.0)
    reached = threshold_reached(corrected)
    if finding.code == "exploding" and reached is not None:
        return replace(finding, severity=min(reached[1], finding.severity, key=severity_rank))
    if not (corrected >= finding.expected if finding.code == "diluted" else corrected < finding.expected):
        return finding
    return replace(finding, severity="note", advice=f"This follows from {wrong.code}: correct the scale first.")


def mask_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Find masks that hide nothing (`inert_mask`)."""
    fill, added, capped = layer.reading.inert_fill, layer.reading.inert_added, layer.reading.capped_mask
    if capped is not None:
        yield layer_finding(
            layer,
            "inert_mask",
            "warning",
            f"The mask comes before the soft-cap, which makes hidden scores {capped:g}: these keys still get weight.",
            "Cap the scores first, then hide keys.",
            (capped, float("-inf")),
        )
    if added is not None:
        yield layer_finding(
            layer,
            "inert_mask",
            "warning",
            f"A mask of zeros and ones is added to the scores: adding {added:+g} hides no key.",
            "Use a mask of True and False, or add one of 0 and −inf.",
            (added, float("-inf")),
        )
    if fill is not None:
        yield layer_finding(
            layer,
            "inert_mask",
            "warning",
            f"A mask sets scores to {fill:g} before the softmax, an ordinary score: these keys still get weight.",
            "Fill with −inf, or add a mask of 0 and −inf to the scores.",
            (fill, float("-inf")),
        )


def softcap_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Find soft-caps that are not applied, cannot bind (`inert_softcap`) or come before the scale."""
    said, cap, usual = layer.declared, layer.softcap, layer.head_dim**-0.5
    if layer.wiring.softcap_unbounded:
        message = "The scores are multiplied by a tanh of themselves, s·tanh(s/cap), which has no bound."
        yield layer_finding(
            layer, "inert_softcap", "warning", message, "Write cap · tanh(s/cap).", (None, said.softcap)
        )
    elif layer.wiring.softcap_discarded:
        message = "A soft-cap of the scores is computed, and its result does not reach the softmax."
        advice = "Assign the result of tanh to the scores."
        yield layer_finding(layer, "inert_softcap", "warning", message, advice, (None, said.softcap))
    elif said.softcap is not None and cap is None:
        message = f"{said.softcap_source} sets a soft-cap of {said.softcap:g}, and none is applied ({layer.kind})."
        other = "Compute cap · tanh(s/cap)" if layer.kind == "eager" else "Use eager or flex, which can have a soft-cap"
        advice = f"{other}, or unset it."
        yield layer_finding(layer, "inert_softcap", "warning", message, advice, (None, said.softcap))
    elif cap is not None and cap > HIGHEST_USEFUL_CAP:
        message = f"The soft-cap of {cap:g} is too high to help: scores do harm from 1,000 on."
        advice = "Cap at 30 to 50, as Gemma 2 and Grok do."
        yield layer_finding(layer, "inert_softcap", "warning", message, advice, (cap, 50.0))
    after = layer.reading.scale_after_cap
    if after is not None and cap is not None and abs(abs(after) - usual) <= SAME_SCALE * usual:
        yield layer_finding(
            layer,
            "softcap_before_scale",
            "warning",
            f"The soft-cap is applied before the scale: q·k is capped at {cap / abs(after):.3g} and then multiplied by "
            f"1/√d_k = {usual:.3g}, so scores are capped at {cap:.3g}.",
            "Scale first: cap · tanh(q·k/√d_k / cap).",
            (cap, cap / abs(after)),
        )


def qk_norm_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Find QK-norms that are configured or built, and never applied (`inert_qk_norm`)."""
    unused = [name for name in layer.wiring.unused_norms if not is_scale(name)]
    placed = layer.wiring.misplaced_norms
    if unused:
        message = f"{' and '.join(unused)} {'was' if len(unused) == 1 else 'were'} built and never used."
        advice = "Normalise the query and the key of each head before their product, and multiply by the gains."
    elif len(placed) > 1 and not layer.wiring.normalised and not layer.reading.unread:
        message = f"{' and '.join(placed)} ran, and query and key are not both normalised."
        advice = "Call them on the query and on the key of each head, before their product."
    elif layer.declared.qk_norm and not layer.wiring.normalised:
        message = f"{layer.declared.qk_norm_source} asks for a QK-norm, and query and key are not normalised."
        advice = "Normalise the query and the key of each head before their product, or unset the flag."
    else:
        return
    yield layer_finding(layer, "inert_qk_norm", "warning", message, advice)


def unused_scale_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Find learned scales that are built and never multiplied (`config_mismatch`)."""
    unused = [name for name in layer.wiring.unused_norms if is_scale(name)]
    if unused and not layer.reading.unread:
        message = f"{' and '.join(unused)} {'is' if len(unused) == 1 else 'are'} built and never multiplied."
        advice = "Multiply the scores by it, or remove it."
        yield layer_finding(layer, "config_mismatch", "warning", message, advice, (layer.scale_applied, None))


def is_scale(name: str) -> bool:
    """Return True if a parameter multiplies scores by its name; else it is a norm's, or a gain."""
    return LEARNED_SCALE.search(name.rpartition(".")[2].lower()) is not None


def dropout_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Find dropout of scores (`dropout_before_softmax`), which only a forward in training mode shows."""
    if layer.reading.dropped:
        yield layer_finding(
            layer,
            "dropout_before_softmax",
            "warning",
            "Dropout is applied to the scores before the softmax: a score of zero still gets weight, and the others "
            "are multiplied by 1/(1 − p), which sharpens them in training only.",
            "Apply dropout to the weights, after the softmax.",
        )


def weight_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Find weights that are no distribution: `undefined_rows`, `softmax_twice`, `weights_not_normalised`."""
    severity = "warning" if trained else "error"
    judged = [each for each in layer.softmaxes if not (each.renormalised or each.is_short)]
    off = max((float(each.off_one) for each in judged if each.off_one is not None), default=0.0)
    if any(softmax.undefined is not None and bool(softmax.undefined) for softmax in layer.softmaxes):
        yield layer_finding(
            layer,
            "undefined_rows",
            "error",
            "Every key of some row is hidden, and the softmax divides 0 by 0: weights are NaN though scores are not.",
            "Let every query see at least one key (itself, for example), or set such rows of the weights to zero "
            "before they meet the values.",
        )
    elif any(softmax.taken_twice for softmax in layer.softmaxes):
        yield layer_finding(
            layer,
            "softmax_twice",
            severity,
            "Softmax is applied twice: the input of the second lies between 0 and 1, so no key can weigh more than e "
            "times another.",
            "Apply softmax once, to the scores.",
        )
    elif layer.wiring.mixes_along_softmax and off > OFF_ONE:
        masked = any(softmax.is_masked for softmax in layer.softmaxes)
        why = "A mask is applied to the weights, after the softmax" if masked else "Weights change after the softmax"
        yield layer_finding(
            layer,
            "weights_not_normalised",
            severity,
            f"{why}: the sum of a row differs from one by up to {off:.2g} where the weights meet the values.",
            "Hide keys before the softmax, by −inf in the scores, or divide the weights by their new sum.",
            (1 - off, 1.0),
        )


def pairing_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Find heads that use the key of one group and the value of another (`heads_mispaired`)."""
    if any(softmax.pairs_differ for softmax in layer.softmaxes):
        yield layer_finding(
            layer,
            "heads_mispaired",
            "warning" if trained else "error",
            f"Keys and values are repeated in different orders: {layer.heads} heads share {layer.kv_heads} keys, and a "
            "head uses the key of one group with the value of another.",
            "Repeat both alike, by repeat_interleave(heads // kv_heads, dim=1), or let the kernel do it (enable_gqa).",
        )


def gradient_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Find queries or keys that are detached, or that a backward pass did not reach (`no_gradient`)."""
    cut = layer.reading.detached
    if cut:
        yield layer_finding(
            layer,
            "no_gradient",
            "warning",
            f"The {' and '.join(cut)} are detached from their projection: no gradient reaches it, and it stays as it "
            "was initialised.",
            "Remove the detach(). If the projection should stay frozen, freeze its parameters instead.",
        )
        return
    has_gradient = {"queries": layer.query_gradient is not None, "keys": layer.key_gradient is not None}
    if sum(has_gradient.values()) == 1:
        reached, missed = sorted(has_gradient, key=lambda side: not has_gradient[side])
        yield layer_finding(
            layer,
            "no_gradient",
            "note" if trained else "warning",
            f"A gradient reached the {reached} and not the {missed}: they are computed without one, or all is frozen.",
            f"Look for no_grad() or .data around what makes the {missed}. Frozen parameters are fine if intended.",
        )


def evaluation_findings(layers: Mapping[str, Layer]) -> Iterator[Finding]:
    """Find dropout of weights in layers that ran while no module was in training mode (`dropout_in_evaluation`)."""
    for layer in layers.values():
        if any(softmax.drops for softmax in layer.softmaxes):
            yield layer_finding(
                layer,
                "dropout_in_evaluation",
                "warning",
                "Dropout is applied to the weights in evaluation mode too: the same input gives a different output "
                "each time.",
                "Drop in training only: dropout_p=p if self.training else 0.0, or nn.Dropout, which knows the mode.",
            )


def mode_findings(layers: Mapping[str, Layer], others: Mapping[str, Layer], is_training: bool) -> Iterator[Finding]:
    """Find scales that depend on the mode; `is_training` is the mode of `layers`, `others` ran in the other one."""
    for name, layer in layers.items():
        other = others.get(name)
        if other is None or other.heads != layer.heads:
            continue
        ours, theirs = layer.scales.double().cpu(), other.scales.double().cpu()
        is_read = ours.isfinite() & theirs.isfinite()
        if torch.allclose(ours[is_read], theirs[is_read], rtol=SAME_IN_BOTH_MODES, atol=0):
            continue
        by_mode = {is_training: layer.scale_applied, not is_training: other.scale_applied}
        yield layer_finding(
            layer,
            "scale_depends_on_mode",
            "warning",
            f"The scores are multiplied by {by_mode[True]:.4g} in training and by {by_mode[False]:.4g} in evaluation.",
            "Apply the same scale in both; otherwise evaluation uses other weights than training did.",
            (by_mode[False], by_mode[True]),
        )


def future_findings(layers: Mapping[str, Layer], trained: bool) -> Iterator[Finding]:
    """Find layers that are not causal among layers of the same name but for its number (`attends_to_future`)."""
    stacks: dict[str, list[Layer]] = {}
    for layer in layers.values():
        if layer.query_len == layer.key_len > 1:
            stacks.setdefault(re.sub(r"\d+", "*", layer.name), []).append(layer)
    for stack in stacks.values():
        not_causal = [layer for layer in stack if not layer.causal]
        if 2 * len(not_causal) < len(stack):
            for layer in not_causal:
                yield layer_finding(
                    layer,
                    "attends_to_future",
                    "warning",
                    f"Its queries see later keys, and most of the {len(stack)} layers of its stack do not: what they "
                    "learn to predict is visible.",
                    "Give it the causal mask of the other layers (is_causal=True).",
                )


# A new check is a function and a line here: of a layer by itself, or of a layer beside the others.
CHECKS: tuple[Callable[[Layer, bool], Iterator[Finding]], ...] = (
    mask_findings,
    softcap_findings,
    qk_norm_findings,
    unused_scale_findings,
    weight_findings,
    dropout_findings,
    pairing_findings,
    gradient_findings,
)
COMPARISONS: tuple[Callable[[Mapping[str, Layer], bool], Iterator[Finding]], ...] = (future_findings,)
