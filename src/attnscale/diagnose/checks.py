"""Check masks, soft-caps, norms, dropout, weights and gradients of an attention layer; list all checks.

A check takes a layer and the flag `trained`, and yields findings.
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

SYMPTOMS = ("diluted", "sharp", "exploding", "qk_norm_freezes")  # codes that a wrong multiplier can cause
HIGHEST_USEFUL_CAP = 1e3  # loss deteriorates above scores of about 1,000 (Wortsman et al. 2023)
OFF_ONE = 0.05  # |row sum − 1|; rounding in half precision stays below this
LEARNED_SCALE = re.compile(r"logit_?scale|log_?scale|temperature|^tau$|softmax_scale|^qk_norm_scale$")
SAME_SCALE = 0.01  # relative tolerance for a factor of 1/√d_k
SAME_IN_BOTH_MODES = 0.02  # relative tolerance; the scale is fitted to scores in half precision


def all_findings(layers: Mapping[str, Layer], trained: bool) -> Iterator[Finding]:
    """Yield all findings about the layers of a model."""
    shares = gradient_shares(layers)
    for name, layer in layers.items():
        yield from findings_of(layer, trained, shares.get(name))
    yield from future_findings(layers)


def findings_of(layer: Layer, trained: bool, gradient_share: Tensor | None = None) -> Iterator[Finding]:
    """Yield all findings about one layer; `gradient_share` is its entry in gradient_shares().

    A symptom of a wrong scale becomes a note, so that one cause gives one warning or error.
    """
    of_scores = list(score_findings(layer, trained, gradient_share))
    if any(finding.code == "non_finite" for finding in of_scores):
        yield from of_scores
        return  # its scores allow no other check
    of_scale, of_spread = list(scale_findings(layer, trained)), list(critical_spread_findings(layer, trained))
    yield from of_scale
    yield from (as_symptom(finding, of_scale, layer) for finding in of_spread)
    yield from (as_symptom(finding, [*of_scale, *of_spread], layer) for finding in of_scores)
    for check in CHECKS:
        yield from check(layer, trained)


def as_symptom(finding: Finding, causes: Sequence[Finding], layer: Layer) -> Finding:
    """Return the finding with the severity that it would have at the right scale.

    `causes` holds the findings about the multiplier.
    """
    wrong = scale_error(causes) or next((each for each in causes if each.code == "qk_norm_freezes"), None)
    if wrong is None or finding.code not in SYMPTOMS or finding.measured is None or finding.expected is None:
        return finding
    right = 1.0 if wrong.code == "qk_norm_freezes" else wrong.expected  # the advised scale gives a spread of one
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
    hidden = float("-inf")
    if capped is not None:
        message = f"The mask comes before the soft-cap, which makes hidden scores {capped:g}: these keys get weight."
        yield layer_finding(layer, "inert_mask", message, "Cap the scores first, then hide keys.", (capped, hidden))
    if added is not None:
        message = f"A mask of zeros and ones is added to the scores: adding {added:+g} hides no key."
        advice = "Use a mask of True and False, or add one of 0 and −inf."
        yield layer_finding(layer, "inert_mask", message, advice, (added, hidden))
    if fill is not None:
        message = f"The mask sets scores to {fill:g}, an ordinary score, before the softmax: these keys get weight."
        advice = "Fill with −inf, or add a mask of 0 and −inf to the scores."
        yield layer_finding(layer, "inert_mask", message, advice, (fill, hidden))


def softcap_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Find soft-caps that are not applied, cannot bind (`inert_softcap`) or come before the scale."""
    declared, cap, usual = layer.declared, layer.softcap, layer.head_dim**-0.5
    message, numbers = "", (cap, declared.softcap)
    if layer.wiring.softcap_unbounded:
        message = "The scores are multiplied by a tanh of themselves, s·tanh(s/cap), which has no bound."
        advice = "Write cap · tanh(s/cap)."
    elif layer.wiring.softcap_discarded:
        message = "A soft-cap of the scores is computed, and its result does not reach the softmax."
        advice = "Assign the result of tanh to the scores."
    elif declared.softcap is not None and cap is None:
        message = (
            f"{declared.softcap_source} sets a soft-cap of {declared.softcap:g}, and none is applied ({layer.kind})."
        )
        other = "Compute cap · tanh(s/cap)" if layer.kind == "eager" else "Use eager or flex, which can have a soft-cap"
        advice = f"{other}, or unset it."
    elif cap is not None and cap > HIGHEST_USEFUL_CAP:
        message = f"The soft-cap is too high to help, {cap:g}: loss deteriorates from scores of about 1,000 on."
        advice, numbers = "Cap at 30 to 50, as Gemma 2 and Grok do.", (cap, 50.0)
    if message:
        yield layer_finding(layer, "inert_softcap", message, advice, numbers)
    after = layer.reading.scale_after_cap
    if after is not None and cap is not None and abs(abs(after) - usual) <= SAME_SCALE * usual:
        message = (
            f"The soft-cap is applied before the scale: q·k is capped at {cap / abs(after):.3g} and then multiplied by "
            f"1/√d_k = {usual:.3g}, so scores are capped at {cap:.3g}."
        )
        advice = "Scale first: cap · tanh(q·k/√d_k / cap)."
        yield layer_finding(layer, "softcap_before_scale", message, advice, (cap, cap / abs(after)))


def norm_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Find QK-norms (`inert_qk_norm`) and learned scales (`config_mismatch`) that exist but are not applied."""
    scales = [name for name in layer.wiring.unused_norms if is_scale(name)]
    unused = [name for name in layer.wiring.unused_norms if not is_scale(name)]
    placed, message = layer.wiring.misplaced_norms, ""
    advice = "Normalise the query and the key of each head before their product"
    if scales and not layer.reading.unread:
        problem = f"{' and '.join(scales)} {'is' if len(scales) == 1 else 'are'} built and never multiplied."
        remedy = "Multiply the scores by it, or remove it."
        yield layer_finding(layer, "config_mismatch", problem, remedy, (layer.scale_applied, None))
    if unused:
        message = f"{' and '.join(unused)} {'was' if len(unused) == 1 else 'were'} built and never used."
        advice += ", and multiply by the gains."
    elif len(placed) > 1 and not layer.wiring.normalised and not layer.reading.unread:
        message = f"{' and '.join(placed)} ran, and query and key are not both normalised."
        advice += "."
    elif layer.declared.qk_norm and not layer.wiring.normalised:
        message = f"{layer.declared.qk_norm_source} asks for a QK-norm, and query and key are not normalised."
        advice += ", or unset the flag."
    if message:
        yield layer_finding(layer, "inert_qk_norm", message, advice)


def is_scale(name: str) -> bool:
    """Return True if the name of a parameter says that it scales the scores; norms and gains do not."""
    return LEARNED_SCALE.search(name.rpartition(".")[2].lower()) is not None


def dropout_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Find dropout of scores (`dropout_before_softmax`); it shows only in training mode."""
    if layer.reading.dropped:
        message = (
            "Dropout is applied to the scores before the softmax: a score of zero still gets weight, and the others "
            "are multiplied by 1/(1 − p), which sharpens them in training only."
        )
        yield layer_finding(
            layer, "dropout_before_softmax", message, "Apply dropout to the weights, after the softmax."
        )


def weight_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Find weights that are not a distribution: `undefined_rows`, `softmax_twice`, `weights_not_normalised`."""
    severity = "warning" if trained else "error"
    judged = [each for each in layer.softmaxes if not (each.renormalised or each.is_short)]
    off = max((float(each.off_one) for each in judged if each.off_one is not None), default=0.0)
    if any(softmax.undefined is not None and bool(softmax.undefined) for softmax in layer.softmaxes):
        message = "Every key of some row is hidden, so its softmax is 0/0: weights are NaN though scores are not."
        advice = (
            "Let every query see at least one key (itself, for example), or set such rows of the weights to zero "
            "before they meet the values."
        )
        yield layer_finding(layer, "undefined_rows", message, advice, severity="error")
    elif any(softmax.taken_twice for softmax in layer.softmaxes):
        message = (
            "Softmax is applied twice: the input of the second lies between 0 and 1, so no key can weigh more than e "
            "times another."
        )
        yield layer_finding(layer, "softmax_twice", message, "Apply softmax once, to the scores.", severity=severity)
    elif layer.wiring.mixes_along_softmax and off > OFF_ONE:
        masked = any(softmax.is_masked for softmax in layer.softmaxes)
        why = "A mask is applied to the weights, after the softmax" if masked else "Weights change after the softmax"
        message = f"{why}: the sum of a row differs from one by up to {off:.2g} where the weights meet the values."
        advice = "Hide keys before the softmax, by −inf in the scores, or divide the weights by their new sum."
        yield layer_finding(layer, "weights_not_normalised", message, advice, (1 - off, 1.0), severity)


def pairing_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Find heads that use the key of one group and the value of another (`heads_mispaired`)."""
    if any(softmax.pairs_differ for softmax in layer.softmaxes):
        message = (
            f"Keys and values are repeated in different orders: {layer.heads} heads share {layer.kv_heads} keys, and a "
            "head uses the key of one group with the value of another."
        )
        advice = "Repeat both by repeat_interleave(heads // kv_heads, dim=1), or let the kernel do it (enable_gqa)."
        severity = "warning" if trained else "error"
        yield layer_finding(layer, "heads_mispaired", message, advice, severity=severity)


def gradient_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Find queries or keys that are detached or got no gradient in a backward pass (`no_gradient`)."""
    if layer.reading.detached:
        sides = " and ".join(layer.reading.detached)
        message = f"The {sides} are detached: no gradient reaches their projection, which stays as initialised."
        advice = "Remove the detach(). If the projection should stay frozen, freeze its parameters instead."
        yield layer_finding(layer, "no_gradient", message, advice)
        return
    has_gradient = {"queries": layer.query_gradient is not None, "keys": layer.key_gradient is not None}
    if sum(has_gradient.values()) == 1:
        reached, missed = sorted(has_gradient, key=lambda side: not has_gradient[side])
        message = f"A gradient reached the {reached} and not the {missed}, which are computed without one or frozen."
        advice = f"Look for no_grad() or .data in the code of the {missed}. Frozen parameters are fine if intended."
        yield layer_finding(layer, "no_gradient", message, advice, severity="note" if trained else "warning")


def evaluation_findings(layers: Mapping[str, Layer]) -> Iterator[Finding]:
    """Find dropout of weights in evaluation mode (`dropout_in_evaluation`)."""
    message = "Dropout is applied to the weights in evaluation mode too: the same input gives different outputs."
    advice = "Drop in training only: dropout_p=p if self.training else 0.0, or nn.Dropout, which knows the mode."
    for layer in layers.values():
        if any(softmax.drops for softmax in layer.softmaxes):
            yield layer_finding(layer, "dropout_in_evaluation", message, advice)


def mode_findings(layers: Mapping[str, Layer], others: Mapping[str, Layer], is_training: bool) -> Iterator[Finding]:
    """Find scales that depend on the mode; `layers` ran in the mode `is_training`, `others` in the other mode."""
    for name, layer in layers.items():
        other = others.get(name)
        if other is None or other.heads != layer.heads:
            continue
        scales, other_scales = layer.scales.double().cpu(), other.scales.double().cpu()
        is_read = scales.isfinite() & other_scales.isfinite()
        if torch.allclose(scales[is_read], other_scales[is_read], rtol=SAME_IN_BOTH_MODES, atol=0):
            continue
        by_mode = {is_training: layer.scale_applied, not is_training: other.scale_applied}
        message = f"The scale depends on the mode: {by_mode[True]:.4g} in training, {by_mode[False]:.4g} in evaluation."
        advice = "Apply the same scale in both; otherwise evaluation uses other weights than training did."
        yield layer_finding(layer, "scale_depends_on_mode", message, advice, (by_mode[False], by_mode[True]))


def future_findings(layers: Mapping[str, Layer]) -> Iterator[Finding]:
    """Find layers that are not causal in a stack of causal layers (`attends_to_future`)."""
    stacks: dict[str, list[Layer]] = {}
    for layer in layers.values():
        if layer.query_len == layer.key_len > 1:
            stacks.setdefault(re.sub(r"\d+", "*", layer.name), []).append(layer)
    for stack in stacks.values():
        not_causal = [layer for layer in stack if not layer.causal]
        if 2 * len(not_causal) < len(stack):
            message = (
                f"Its queries see later keys, and most of the {len(stack)} layers of its stack do not: the model can "
                "see the tokens that it learns to predict."
            )
            advice = "Give it the causal mask of the other layers (is_causal=True)."
            for layer in not_causal:
                yield layer_finding(layer, "attends_to_future", message, advice)


# To add a check, write a function and list it here.
CHECKS: tuple[Callable[[Layer, bool], Iterator[Finding]], ...] = (
    mask_findings,
    softcap_findings,
    norm_findings,
    weight_findings,
    dropout_findings,
    pairing_findings,
    gradient_findings,
)
