"""The multiplier that was applied, against the one that should have been."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from attnscale.declared import Authority
from attnscale.diagnose.finding import Finding
from attnscale.diagnose.published import is_published
from attnscale.numerics import HALF_DTYPES
from attnscale.watching.layer import Layer

TOLERANCE = 0.01  # relative: a slope fitted to float32 scores is good to 1e-3
FOLDED_SPREAD = 3.0  # a scale folded into the weights leaves a spread of about one
HALF_TOLERANCE = 0.02  # scores in half precision are rounded to three digits


@dataclass(frozen=True)
class Mismatch:
    """Why a multiplier is wrong, before it is said of which heads."""

    code: str
    expected: float
    message: str
    advice: str


def scale_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Everything that is wrong with where and by what the scores of a layer are multiplied."""
    if not layer.wiring.mixes_along_softmax:
        yield _wrong_axis(layer)
    if layer.reading.unread or layer.declared.folded is not None:
        return  # it cannot be told, or was chosen and is in the weights
    if _scales_after_softmax(layer):
        yield _after_softmax(layer, trained)
    else:
        yield from _multiplier(layer, trained)
    if layer.wiring.bias_is_scaled:
        yield _scaled_bias(layer)


def _multiplier(layer: Layer, trained: bool) -> Iterator[Finding]:
    scales = {head: scale for head, scale in enumerate(layer.scales.double().tolist()) if math.isfinite(scale)}
    wrong = {head: found for head, scale in scales.items() if (found := _mismatch(layer, scale)) is not None}
    if not wrong:
        return
    if not _alike(list(scales.values()), _tolerance(layer)):
        yield _one_for_each_head(layer, list(scales.values()))
    else:
        head, found = next(iter(wrong.items()))
        yield _finding(layer, None, found, scales[head], trained)


def _mismatch(layer: Layer, scale: float) -> Mismatch | None:
    """The most specific thing that is wrong with one multiplier; None where it is right, declared or published."""
    said, tolerance = layer.declared, _tolerance(layer)
    is_declared = any(_close(scale, reading, tolerance) for reading in said.scale_readings)
    if said.scale_authority is Authority.CONFIGURED and (is_declared or said.scale is None):
        return None
    ignores = not is_declared and _says_another(layer)
    if _is_usual(layer, scale):
        return _ignored(layer, scale) if ignores else None
    if layer.wiring.normalised:  # the norms are chosen with the multiplier: together they make the spread
        return _ignored(layer, scale) if ignores and said.scale_authority is Authority.CONFIGURED else None
    specific = _classic(layer, scale)
    if specific is not None:
        return None if specific.code == "unscaled" and _is_folded(layer) else specific
    if ignores:
        return _ignored(layer, scale)
    if is_declared and not _slip(layer, scale):
        return None
    known = is_published(layer, scale, tolerance)
    if is_declared and known:
        return None  # said twice: 1/√heads may be what a rule gives
    is_learned = layer.reading.learned_factor or layer.reading.learned_terms  # or one of several: distances have 2
    if (known or is_learned) and not _slip(layer, scale):
        return None
    return _unusual(layer, scale)


def _is_usual(layer: Layer, scale: float) -> bool:
    """1/√d_k; where m terms of activations are added, 1/√(m d_k) as well (DeBERTa, AlphaFold's points).

    Queries that were projected from fewer features than they have are of that lower rank, as where DeepSeek's key
    projection is absorbed into them: of such, 1/√rank as well, and what lies between, some features being rotary.
    """
    terms, tolerance = range(1, 2 + layer.reading.learned_terms), _tolerance(layer)
    if any(_close(scale, (count * layer.head_dim) ** -0.5, tolerance) for count in terms):
        return True
    rank = min((layer.head_dim, *layer.model_dims))
    return bool(layer.head_dim**-0.5 <= scale <= rank**-0.5 * (1 + tolerance))


def _says_another(layer: Layer) -> bool:
    """Whether the model clearly asks for a multiplier of its own; a module that restates 1/√d_k asks for nothing."""
    said = layer.declared
    if said.scale is None or said.scale_authority < Authority.NAMED:
        return False
    return said.scale_authority is Authority.CONFIGURED or not _restates_usual(layer)


def _classic(layer: Layer, scale: float) -> Mismatch | None:
    """One of the three mistakes that have a code: no scale, d_k for √d_k, √d_model for √d_k."""
    usual, tolerance, dim = layer.head_dim**-0.5, _tolerance(layer), layer.head_dim
    advice = f"Multiply q·k by 1/√d_k = {usual:.4g}, d_k = {dim} being the width of one head."
    if _close(scale, 1.0, tolerance):
        grows = f"their spread grows as √d_k = {dim**0.5:.3g}"
        return Mismatch("unscaled", usual, f"The scores are q·k without a scale, so {grows}.", advice)
    width = next((width for width in layer.model_dims if _close(scale, width**-0.5, tolerance)), None)
    by_dim = _close(scale, 1 / dim, tolerance)
    if by_dim and (width is None or _restates_usual(layer)):
        also = "" if width is None else f" (which is also 1/√{width}, the model's width)"
        message = f"The scores are multiplied by {scale:.4g} = 1/d_k{also}, where 1/√d_k = {usual:.4g} is expected"
        twice = "Divide by √d_k, not d_k; if √d_k is divided by, it is so twice: in the query and in the kernel's own."
        return Mismatch("scaled_by_dim", usual, f"{message}.", twice)
    if width is not None:
        also = " (which is also 1/d_k)" if by_dim else ""
        message = f"The scores are multiplied by {scale:.4g} = 1/√{width}{also}, the model's width"
        return Mismatch("scaled_by_model_dim", usual, f"{message}, where 1/√d_k = {usual:.4g} is expected.", advice)
    return None


def _restates_usual(layer: Layer) -> bool:
    """Whether the module itself means 1/√d_k: then 1/d_k is that, applied twice, and not another width."""
    said = layer.declared.scale
    return said is not None and _close(said, layer.head_dim**-0.5, TOLERANCE)


def _is_folded(layer: Layer) -> bool:
    """Whether the query was made smaller by about √d_k instead, as T5 does when it draws the query's projection.

    Where the scale was forgotten, query and key have about the same norm; here they differ by √d_k, and half of that,
    on a logarithmic scale, tells the two apart. The spread must be moderate too: that is what folding is for.
    """
    query_norm, key_norm = (float(norm.double().square().mean().sqrt()) for norm in (layer.query_norm, layer.key_norm))
    spread = float(layer.stats.std.nanmean())
    return bool(query_norm < key_norm * layer.head_dim**-0.25 and spread < FOLDED_SPREAD)


def _slip(layer: Layer, scale: float) -> str:
    """A slip of the pen that has no code of its own; its name, where the multiplier is one."""
    slips = {"√d_k (multiplied where it should divide)": layer.head_dim**0.5, "1/√heads": layer.heads**-0.5}
    return next((name for name, value in slips.items() if _close(scale, value, _tolerance(layer))), "")


def _unusual(layer: Layer, scale: float) -> Mismatch:
    usual = layer.head_dim**-0.5
    slip = _slip(layer, scale)
    if scale == 0:
        message = "The softmax's input does not depend on q·k at all."
    elif slip:
        message = f"The scores are multiplied by {scale:.4g} = {slip}, where 1/√d_k = {usual:.4g} is expected."
    else:
        message = f"The scores are multiplied by {scale:.4g}, {scale / usual:.3g} times 1/√d_k = {usual:.4g}."
    advice = f"If that is meant, say so in the configuration (softmax_scale); else multiply by {usual:.4g}."
    return Mismatch("unusual_scale", usual, message, advice)


def _ignored(layer: Layer, scale: float) -> Mismatch:
    said = layer.declared
    assert said.scale is not None  # else there is nothing to ignore
    return Mismatch(
        "config_mismatch",
        said.scale,
        f"The scores are multiplied by {scale:.4g}, where {said.scale_source} sets {said.scale:.4g}.",
        f"Pass the scale on to what computes the attention (scale={said.scale:.4g}), or mend {said.scale_source}.",
    )


def _one_for_each_head(layer: Layer, scales: list[float]) -> Finding:
    usual = layer.head_dim**-0.5
    low, high = min(scales), max(scales)
    return Finding(
        layer.name,
        None,
        "unusual_scale",
        "note",
        f"Each head has a multiplier of its own, from {low:.4g} to {high:.4g}, {low / usual:.2g} to "
        f"{high / usual:.2g} times 1/√d_k: a learned temperature, or a scale that depends on the length.",
        layer.scale_applied,
        usual,
        "Nothing to do if it is meant to be learned; watch the sharpest head.",
    )


def _finding(layer: Layer, head: int | None, found: Mismatch, scale: float, trained: bool) -> Finding:
    severity = {"unusual_scale": "note" if trained else "warning", "config_mismatch": "warning"}.get(
        found.code, "warning" if trained else "error"
    )
    return Finding(layer.name, head, found.code, severity, found.message, scale, found.expected, found.advice)


def _scales_after_softmax(layer: Layer) -> bool:
    """A constant on the weights or the output that belongs on the scores: it is one of theirs, or they have none."""
    factor, tolerance = layer.wiring.factor_after_softmax, _tolerance(layer)
    if _close(factor, 1.0, tolerance):
        return False
    widths = (layer.head_dim**-0.5, 1 / layer.head_dim, *(width**-0.5 for width in layer.model_dims))
    is_a_scale = any(_close(abs(factor), width, tolerance) for width in widths)
    classic = _classic(layer, layer.scale_applied)
    return is_a_scale or (classic is not None and classic.code == "unscaled")


def _after_softmax(layer: Layer, trained: bool) -> Finding:
    factor, usual = layer.wiring.factor_after_softmax, layer.head_dim**-0.5
    return Finding(
        layer.name,
        None,
        "scale_after_softmax",
        "warning" if trained else "error",
        f"The weights or the output are multiplied by {factor:.4g} after the softmax, and the scores before it by "
        f"{layer.scale_applied:.4g}, where 1/√d_k = {usual:.4g} is expected.",
        factor,
        1.0,
        "Multiply the scores by it before the softmax, and nothing after it: the weights of a row must sum to one.",
    )


def _wrong_axis(layer: Layer) -> Finding:
    return Finding(
        layer.name,
        None,
        "softmax_wrong_axis",
        "error",
        "The softmax runs over another axis than the keys, so the weights that a query gives its values do not sum "
        "to one.",
        None,
        None,
        "Take the softmax over the axis of the keys, the last of (…, heads, queries, keys): dim=-1.",
    )


def _scaled_bias(layer: Layer) -> Finding:
    return Finding(
        layer.name,
        None,
        "unusual_scale",
        "note",
        f"The position bias is multiplied by the scale, {layer.scale_applied:.4g}, together with q·k, which makes it "
        f"{1 / max(abs(layer.scale_applied), 1e-300):.3g} times weaker than it says.",
        layer.scale_applied,
        1.0,
        "Falcon does so on purpose; where it is not meant, add the bias after the scores are scaled.",
    )


def _tolerance(layer: Layer) -> float:
    return HALF_TOLERANCE if layer.dtype in HALF_DTYPES else TOLERANCE


def _alike(scales: list[float], tolerance: float) -> bool:
    return all(_close(scale, scales[0], tolerance) for scale in scales)


def _close(value: float, wanted: float, tolerance: float) -> bool:
    return math.isclose(value, wanted, rel_tol=tolerance)
