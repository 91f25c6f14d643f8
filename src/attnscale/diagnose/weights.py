"""What becomes of the weights: between the softmax and the values."""

from collections.abc import Iterator

from attnscale.diagnose.finding import Finding
from attnscale.watching.layer import Layer

OFF_ONE = 0.05  # of the sum of a row: half precision rounds a long row by less


def weight_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """`undefined_rows`, `softmax_twice` and `weights_not_normalised`."""
    if any(softmax.undefined is not None and bool(softmax.undefined) for softmax in layer.softmaxes):
        yield _undefined(layer)
    elif any(softmax.taken_twice for softmax in layer.softmaxes):
        yield _twice(layer, trained)
    elif layer.wiring.mixes_along_softmax:
        yield from _not_normalised(layer, trained)


def _undefined(layer: Layer) -> Finding:
    return Finding(
        layer.name,
        None,
        "undefined_rows",
        "error",
        "Weights are NaN though the scores are not: every key of some row is hidden, and the softmax divides 0 by 0.",
        None,
        None,
        "Let every query see one key at least, itself say, or set such rows of the weights to zero before they meet "
        "the values.",
    )


def _twice(layer: Layer, trained: bool) -> Finding:
    return Finding(
        layer.name,
        None,
        "softmax_twice",
        "warning" if trained else "error",
        "A softmax is taken of the weights of a softmax: these lie between 0 and 1, so no key can weigh more than e "
        "times another.",
        None,
        None,
        "Take the softmax once, of the scores.",
    )


def _not_normalised(layer: Layer, trained: bool) -> Iterator[Finding]:
    judged = [each for each in layer.softmaxes if not (each.renormalised or each.is_short)]
    off = [float(each.off_one) for each in judged if each.off_one is not None]
    if not off or max(off) <= OFF_ONE:
        return
    masked = any(softmax.is_masked for softmax in layer.softmaxes)
    why = "a mask is applied to the weights, after the softmax" if masked else "they are changed after the softmax"
    yield Finding(
        layer.name,
        None,
        "weights_not_normalised",
        "warning" if trained else "error",
        f"The weights of a row miss one by up to {max(off):.2g} where they meet the values: {why}.",
        1 - max(off),
        1.0,
        "Hide keys before the softmax, by −inf in the scores, or divide the weights by what is left of their sum.",
    )
