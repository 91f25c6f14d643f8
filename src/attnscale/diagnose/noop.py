"""Silent no-ops: a soft-cap that cannot bind, a QK-norm that is never applied, a mask that hides nothing."""

from collections.abc import Iterator

from attnscale.diagnose.finding import Finding
from attnscale.watching.layer import Layer

HIGHEST_USEFUL_CAP = 1e3  # loss deteriorates from scores of about 1,000 on (Wortsman et al. 2023)


def noop_findings(layer: Layer, trained: bool = False) -> Iterator[Finding]:
    """What a layer was given to keep its scores in range, and does not use."""
    yield from _softcap(layer)
    yield from _qk_norm(layer)
    yield from _mask(layer)


def _mask(layer: Layer) -> Iterator[Finding]:
    fill, added = layer.reading.inert_fill, layer.reading.inert_added
    if added is not None:
        yield Finding(
            layer.name,
            None,
            "inert_mask",
            "warning",
            f"A mask of zeros and ones is added to the scores: by {added:+g} no key is hidden, all are seen.",
            added,
            float("-inf"),
            "Give a mask of True and False, or add one of 0 and −inf.",
        )
    if fill is not None:
        yield Finding(
            layer.name,
            None,
            "inert_mask",
            "warning",
            f"A mask sets scores to {fill:g} before the softmax, which is a score like any other: these keys are seen.",
            fill,
            float("-inf"),
            "Fill with −inf, or add a mask of 0 and −inf to the scores.",
        )


def _softcap(layer: Layer) -> Iterator[Finding]:
    said = layer.declared
    if layer.wiring.softcap_discarded:
        message = "A soft-cap of the scores is computed, and its result does not reach the softmax."
        yield _inert_softcap(layer, message, None, said.softcap, "Assign what the tanh returns to the scores.")
    elif said.softcap is not None and layer.softcap is None:
        message = f"{said.softcap_source} sets a soft-cap of {said.softcap:g}, and none is applied ({layer.kind})."
        advice = "Use an implementation that has a soft-cap (eager or flex), or unset it."
        yield _inert_softcap(layer, message, None, said.softcap, advice)
    elif layer.softcap is not None and layer.softcap > HIGHEST_USEFUL_CAP:
        message = f"The soft-cap of {layer.softcap:g} lies above 1,000, where scores already do harm."
        yield _inert_softcap(layer, message, layer.softcap, 50.0, "Cap at 30 to 50, as Gemma 2 and Grok do.")


def _inert_softcap(layer: Layer, message: str, measured: float | None, expected: float | None, advice: str) -> Finding:
    return Finding(layer.name, None, "inert_softcap", "warning", message, measured, expected, advice)


def _qk_norm(layer: Layer) -> Iterator[Finding]:
    unused = layer.wiring.unused_norms
    if unused:
        message = f"{' and '.join(unused)} {'was' if len(unused) == 1 else 'were'} built and never called."
        advice = "Call the norm on the query and on the key of each head, before their product."
    elif layer.declared.qk_norm and not layer.wiring.normalised:
        message = f"{layer.declared.qk_norm_source} asks for a QK-norm, and query and key are not normalised."
        advice = "Normalise the query and the key of each head before their product, or unset the flag."
    else:
        return
    yield Finding(layer.name, None, "inert_qk_norm", "warning", message, None, None, advice)
