"""Compare the applied multiplier with the expected one.

Trained models are judged too: a port may load the right weights and apply the wrong constant.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from attnscale.declared import Authority
from attnscale.diagnose.finding import Finding, layer_finding
from attnscale.numerics import HALF_DTYPES
from attnscale.rules.log_length import SSMAX_S
from attnscale.rules.mup import MUP_BASE
from attnscale.rules.yarn import sharpening
from attnscale.watching.layer import Layer

TOLERANCE = 0.01  # relative; the multiplier is fitted to scores, with an error of 1e-3 in float32
FOLDED_SPREAD = 3.0  # a larger spread means that no scale was folded into the weights
HALF_TOLERANCE = 0.02  # relative; scores in half precision have three digits
MISTAKE_SHARE = 0.3  # share of the tolerance; stricter, so that a custom scale rarely matches one of many mistakes
NO_RULE_GIVES = ("√d_k (multiplied where it should divide)", "1/√heads")  # always mistakes
STRETCHES = (2, 3, 4, 5, 6, 8, 10, 16, 20, 32, 40, 64, 128)  # usual factors of YaRN; DeepSeek uses 40
# YaRN's factor for s = 64 differs from 2 by 0.3%, so a published rule needs a stricter tolerance than a scale.
RULE_SHARE = 0.1
UNIT_LENGTH = 1.1  # largest ‖q‖·‖k‖ of normalised vectors, with rounding
# Codes of findings about a wrong multiplier.
WRONG_SCALE = (
    "unscaled", "scaled_by_dim", "scaled_by_model_dim", "unusual_scale", "config_mismatch", "scale_after_softmax",
)  # fmt: skip


def scale_error(findings: Iterable[Finding]) -> Finding | None:
    """Return the warning or error about the multiplier of a layer, if there is one."""
    return next((each for each in findings if each.code in WRONG_SCALE and each.severity != "note"), None)


def correction(layer: Layer) -> float:
    """Return the ratio of a layer's expected multiplier to the applied one."""
    return abs(layer.scale_expected) / max(abs(layer.scale_applied), 1e-300)


def scale_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Find errors in the multiplier of a layer's scores, and in the place where it is applied."""
    if not layer.wiring.mixes_along_softmax:
        yield _wrong_axis(layer)
    if layer.reading.unread or layer.declared.folded is not None:
        return  # unreadable, or folded into the weights on purpose
    if _scales_after_softmax(layer):
        yield _after_softmax(layer, trained)
    else:
        yield from _multiplier(layer, trained)
    if layer.wiring.bias_is_scaled:
        yield _scaled_bias(layer)


def is_chosen(layer: Layer, scale: float) -> bool:
    """Return True if a configuration or a rule sets this multiplier, or one that depends on the tensors."""
    declared = layer.declared
    if declared.scale_authority is not Authority.CONFIGURED:
        return False
    return declared.scale is None or _is_declared(layer, scale)


def _is_declared(layer: Layer, scale: float) -> bool:
    return any(_is_close(layer, scale, reading) for reading in layer.declared.scale_readings)


def is_cosine(layer: Layer) -> bool:
    """Return True if queries and keys have length one: then 1/√d_k is no default for the multiplier."""
    norms = float((layer.query_norm.double() * layer.key_norm.double()).nanmean())
    return layer.wiring.normalised and norms < UNIT_LENGTH


def _multiplier(layer: Layer, trained: bool) -> Iterator[Finding]:
    scales = {head: scale for head, scale in enumerate(layer.scales.double().tolist()) if math.isfinite(scale)}
    negative = {head: scale for head, scale in scales.items() if scale < 0}
    if negative and not is_chosen(layer, min(negative.values())):
        yield _negative(layer, negative)
        return
    found = next(filter(None, (_mismatch(layer, scale, trained) for scale in scales.values())), None)
    if found is None:
        return
    if all(_is_close(layer, scale, found.measured or 0.0) for scale in scales.values()):
        yield replace(found, severity="warning") if trained else found  # training may have compensated for it
    else:
        yield _one_for_each_head(layer, list(scales.values()))


def _mismatch(layer: Layer, scale: float, trained: bool) -> Finding | None:
    """Return the most specific mistake that explains the multiplier; None if it is right, declared or published.

    A number in an attribute of the module may itself be the mistake, so it is judged like a number in the code. It
    counts as a choice only if no common mistake explains it.
    """
    stretched = _stretch_mismatch(layer, scale)
    if stretched is not None:
        return stretched
    if is_chosen(layer, scale):
        return None
    is_declared = _is_declared(layer, scale)
    ignored = None if is_declared or not _declares_another(layer) else _ignored(layer, scale)
    if _is_usual(layer, scale) or is_cosine(layer):
        return ignored
    if trained and layer.reading.learned_factor:
        return None  # a learned multiplier can have any value
    specific = _classic(layer, scale)
    if specific is not None:
        excused = specific.code == "unscaled" and (layer.wiring.normalised or _is_folded(layer))
        return None if excused else specific
    if ignored is not None:
        return ignored
    is_published = any(_is_close(layer, scale, rule, RULE_SHARE) for rule in _published(layer))
    slip = next((words for words, value in _slips(layer) if _is_close(layer, scale, value, MISTAKE_SHARE)), "")
    if is_published and (is_declared or slip not in NO_RULE_GIVES):
        return None  # a rule may give the same number as a mistake, such as 1/√(d_k/2)
    is_learned = layer.reading.learned_factor or layer.reading.learned_terms  # a distance has two terms
    if not slip and (is_declared or is_learned or layer.wiring.normalised):
        return None  # a custom number; with norms it was tuned together with their gains
    return _unusual(layer, scale, slip)


def _stretch_mismatch(layer: Layer, scale: float) -> Finding | None:
    """Find a YaRN factor that is missing in both the rotation and the scale, or applied in both."""
    declared, stretch, origins = layer.declared, layer.declared.stretch, layer.origins[:1]
    if abs(stretch - 1) < 2 * _tolerance(layer) or not origins or origins[0].query is None or origins[0].key is None:
        return None
    rotation = origins[0].query.amplitude() * origins[0].key.amplitude()
    configured = declared.scale if declared.scale_authority is Authority.CONFIGURED else None
    base = configured or layer.head_dim**-0.5
    applied = scale / base * rotation
    mistakes = {
        "neither the rotation nor the scale has it": 1.0,
        "both the rotation and the scale have it": stretch**2,
        "they have the factor of mscale, where mscale_all_dim counts": declared.stretch_confused,
    }
    has = next((words for words, wrong in mistakes.items() if _is_close(layer, applied, wrong)), "")
    if not has or _is_close(layer, applied, stretch):
        return None
    right = base * stretch / rotation
    message = (
        f"{declared.stretch_source} asks for scores × {stretch:.4g}, once, and {has}: the rotation multiplies them by "
        f"{rotation:.4g}, the scale is {scale:.4g}."
    )
    advice = f"Multiply the scores by {right:.4g}"
    advice += f", or cos and sin by {stretch**0.5:.4g}." if rotation < 1.01 else "."
    return layer_finding(layer, "config_mismatch", message, advice, (scale, right))


def _published(layer: Layer) -> Iterator[float]:
    """Yield published multipliers other than 1/√d_k, for plausible values of their parameter."""
    usual = layer.head_dim**-0.5
    yield math.sqrt(MUP_BASE) / layer.head_dim
    yield from (usual * sharpening(stretch) for stretch in STRETCHES)
    if not layer.causal:  # in a causal layer the multiplier differs from row to row, and the fit matches none
        yield from (usual * s * math.log(layer.key_len) for s in (SSMAX_S, 1.0))


def _is_usual(layer: Layer, scale: float) -> bool:
    """Return True for 1/√d_k; for a sum of m products, also for 1/√(m d_k) (DeBERTa, AlphaFold).

    Queries projected from fewer features have a lower rank, as in DeepSeek, where they absorb the key projection. For
    them 1/√rank is usual too, and any value between the two, because some features are rotary.
    """
    terms = range(1, 2 + layer.reading.learned_terms)
    if any(_is_close(layer, scale, (count * layer.head_dim) ** -0.5) for count in terms):
        return True
    rank = min((layer.head_dim, *layer.model_dims))
    return bool(layer.head_dim**-0.5 <= scale <= rank**-0.5 * (1 + _tolerance(layer)))


def _declares_another(layer: Layer) -> bool:
    """Return True if the model clearly declares a multiplier other than 1/√d_k."""
    declared = layer.declared
    if declared.scale is None or declared.scale_authority < Authority.NAMED:
        return False
    return declared.scale_authority is Authority.CONFIGURED or not _restates_usual(layer)


def _classic(layer: Layer, scale: float) -> Finding | None:
    """Return one of the three mistakes that have a code: no scale, d_k for √d_k, √d_model for √d_k."""
    usual, dim = layer.head_dim**-0.5, layer.head_dim
    advice = f"Multiply q·k by 1/√d_k = {usual:.4g} (d_k = {dim} is the width of one head)."
    if _is_close(layer, scale, 1.0):
        message = f"The scores are q·k without a scale, so their spread grows as √d_k = {dim**0.5:.3g}."
        return layer_finding(layer, "unscaled", message, advice, (scale, usual), "error")
    width = next((width for width in layer.model_dims if _is_close(layer, scale, width**-0.5)), None)
    by_dim = _is_close(layer, scale, 1 / dim)
    if by_dim and (width is None or _restates_usual(layer)):
        also = "" if width is None else f" (also 1/√{width}, of the model's width)"
        message = f"The scores are divided by d_k: their scale is {scale:.4g}{also}, not 1/√d_k = {usual:.4g}."
        advice = f"Multiply by 1/√d_k = {usual:.4g}, not 1/d_k"
        advice += "; or √d_k is applied twice: once to the query and again inside SDPA."
        return layer_finding(layer, "scaled_by_dim", message, advice, (scale, usual), "error")
    if width is not None:
        also = " (also 1/d_k)" if by_dim else ""
        message = (
            f"The scores are divided by √{width}, of the model's width: their scale is {scale:.4g}{also}, not 1/√d_k = "
            f"{usual:.4g}."
        )
        return layer_finding(layer, "scaled_by_model_dim", message, advice, (scale, usual), "error")
    return None


def _restates_usual(layer: Layer) -> bool:
    """Return True if the module declares 1/√d_k: then 1/d_k means that it was applied twice."""
    declared = layer.declared.scale
    return declared is not None and math.isclose(declared, layer.head_dim**-0.5, rel_tol=TOLERANCE)


def _is_folded(layer: Layer) -> bool:
    """Return True if the scale is folded into the query, which is then smaller by about √d_k, as in T5.

    If the scale was forgotten, query and key have about the same norm. If it was folded, they differ by √d_k. The
    threshold is the geometric mean of the two. The spread must be moderate too.
    """
    query_norm, key_norm = (float(norm.double().square().mean().sqrt()) for norm in (layer.query_norm, layer.key_norm))
    spread = float(layer.stats.std.nanmean())
    return bool(query_norm < key_norm * layer.head_dim**-0.25 and spread < FOLDED_SPREAD)


def _slips(layer: Layer) -> Iterator[tuple[str, float]]:
    """Yield common mistakes without a code of their own: a description, and the resulting multiplier."""
    dim, heads, kv_heads = layer.head_dim, layer.heads, layer.kv_heads
    yield from zip(NO_RULE_GIVES, (dim**0.5, heads**-0.5), strict=True)
    for width in layer.model_dims:
        for count, of in dict.fromkeys(((heads, "heads"), (kv_heads, "key heads"))):
            yield f"1/√{width / count:g}, the model's width over its {of}, {width}/{count}", (width / count) ** -0.5
    yield f"1/√√{dim} (a fourth root, on query or key alone)", dim**-0.25
    yield f"1/√{dim // 2}, of half a head", max(dim // 2, 1) ** -0.5
    yield f"1/√{layer.key_len}, of the number of keys", layer.key_len**-0.5
    yield "2/d_k (d ** 1/2 is d/2: write d ** 0.5)", 2 / dim
    yield "1/(2 d_k) (s / d ** 1/2 is s/d/2: write s / d ** 0.5)", 0.5 / dim
    if layer.softcap is not None:
        yield "cap/√d_k (cap · tanh(s), without the division by the cap)", layer.softcap * dim**-0.5
    for width in {call.value.shape[-1] for call in layer.kept if call.value is not None} - {dim}:
        yield f"1/√{width}, of the width of the values", width**-0.5


def _unusual(layer: Layer, scale: float, slip: str) -> Finding:
    usual = layer.head_dim**-0.5
    advice = f"If this is intended, set it in the configuration (softmax_scale); otherwise multiply by {usual:.4g}."
    message = f"The scores are multiplied by {scale:.4g}, {scale / usual:.3g} times 1/√d_k = {usual:.4g}."
    if scale == 0:
        message = "The input of the softmax does not depend on q·k."
    elif slip:
        message = f"The scores are multiplied by {scale:.4g} = {slip}, not 1/√d_k = {usual:.4g}."
        advice = f"Multiply by {usual:.4g}: queries and keys have d_k = {layer.head_dim} features."
    return layer_finding(layer, "unusual_scale", message, advice, (scale, usual))


def _negative(layer: Layer, scales: dict[int, float]) -> Finding:
    heads, lowest = f"head{'s' * (len(scales) > 1)} {', '.join(map(str, scales))}", min(scales.values())
    which = "every head" if len(scales) == layer.heads else heads
    why = "A learned temperature has become negative" if layer.reading.learned_factor else "The scale is negative"
    message = (
        f"{why}: the scores of {which} are multiplied by {lowest:.4g}, so the keys least like a query get the most "
        "weight."
    )
    advice = "Keep it positive: learn its logarithm and apply exp, or clamp it."
    return layer_finding(layer, "unusual_scale", message, advice, (lowest, layer.head_dim**-0.5))


def _ignored(layer: Layer, scale: float) -> Finding:
    declared = layer.declared
    assert declared.scale is not None  # the caller checked that a scale is declared
    wanted = declared.scale
    if is_cosine(layer) and declared.scale_authority is not Authority.CONFIGURED:
        wanted = max(wanted, 1 / wanted)  # a temperature of 0.1 and a multiplier of 10 mean the same
    message = f"The scores are multiplied by {scale:.4g}, and {declared.scale_source} sets {wanted:.4g}."
    advice = f"Pass the scale to the attention function (scale={wanted:.4g}), or correct {declared.scale_source}."
    return layer_finding(layer, "config_mismatch", message, advice, (scale, wanted))


def _one_for_each_head(layer: Layer, scales: list[float]) -> Finding:
    usual, low, high = layer.head_dim**-0.5, min(scales), max(scales)
    message = (
        f"Each head has its own scale, from {low:.4g} to {high:.4g} ({low / usual:.2g} to {high / usual:.2g} times "
        "1/√d_k): a learned temperature, or a scale that depends on the length."
    )
    advice = "Nothing to do if it is learned on purpose; watch the sharpest head."
    return layer_finding(layer, "unusual_scale", message, advice, (layer.scale_applied, usual), "note")


def _scales_after_softmax(layer: Layer) -> bool:
    """Return True if weights or output are multiplied by a scale, or by any factor if the scores have no scale."""
    factor = layer.wiring.factor_after_softmax
    if _is_close(layer, factor, 1.0):
        return False
    scales = (layer.head_dim**-0.5, 1 / layer.head_dim, *(width**-0.5 for width in layer.model_dims))
    return _is_close(layer, layer.scale_applied, 1.0) or any(_is_close(layer, abs(factor), each) for each in scales)


def _after_softmax(layer: Layer, trained: bool) -> Finding:
    factor, usual = layer.wiring.factor_after_softmax, layer.head_dim**-0.5
    message = (
        f"The scale is applied after the softmax: weights or output are multiplied by {factor:.4g}, and the scores by "
        f"{layer.scale_applied:.4g}, not 1/√d_k = {usual:.4g}."
    )
    advice = "Multiply the scores before the softmax, and nothing after it: the weights of a row must sum to one."
    severity = "warning" if trained else "error"
    return layer_finding(layer, "scale_after_softmax", message, advice, (factor, 1.0), severity)


def _wrong_axis(layer: Layer) -> Finding:
    axes = layer.wiring.axis_of_keys
    runs, advice = "another axis than the keys", "Take the softmax over the axis of the keys."
    if axes is not None:
        softmax, keys, rank = axes
        also = ", the last (dim=-1)" if keys == rank - 1 else ""
        runs = f"dim={softmax} of its {rank} axes, and the values are summed over dim={keys}"
        advice = f"Take the softmax over the axis of the keys: dim={keys}{also}."
    message = f"The softmax runs over {runs}: the weights that a query gives its keys do not sum to one."
    return layer_finding(layer, "softmax_wrong_axis", message, advice, severity="error")


def _scaled_bias(layer: Layer) -> Finding:
    weaker = 1 / max(abs(layer.scale_applied), 1e-300)
    message = (
        f"The position bias is multiplied by the scale too, {layer.scale_applied:.4g}, which makes it {weaker:.3g} "
        "times weaker than it says."
    )
    advice = "Falcon does so on purpose. If it is not intended, add the bias after the scores are scaled."
    return layer_finding(layer, "unusual_scale", message, advice, (layer.scale_applied, 1.0), "note")


def _tolerance(layer: Layer) -> float:
    return HALF_TOLERANCE if layer.dtype in HALF_DTYPES else TOLERANCE


def _is_close(layer: Layer, value: float, wanted: float, share: float = 1.0) -> bool:
    """Return True if two multipliers differ by less than the layer's tolerance, or this share of it."""
    return math.isclose(value, wanted, rel_tol=share * _tolerance(layer))
