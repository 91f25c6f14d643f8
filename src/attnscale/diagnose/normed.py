"""Normalised queries and keys with a multiplier that freezes the softmax before training has begun."""

from collections.abc import Iterator

from attnscale.diagnose.finding import Finding
from attnscale.theory.limits import freezing_point
from attnscale.watching.layer import Layer

MANY_KEYS = 8  # the freezing point is a law of many keys
UNIT_LENGTH = 1.1  # of cosine attention, which starts at 10 (Swin v2) or log₂(n² − n), and learns from there
PUBLISHED_COSINE = 20.0


def normed_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """`qk_norm_freezes`: |a| ‖q‖ ‖k‖ / √d_k, the spread of random directions, and the measured one, past √(2 ln n)."""
    if trained or not layer.wiring.normalised or layer.reading.unread:
        return
    keys = float(layer.stats.keys.nanmean())
    if not keys >= MANY_KEYS:  # NaN where none of the rows looked at sees a key
        return
    norms = float((layer.query_norm.double() * layer.key_norm.double()).nanmean())
    scale, spread = abs(layer.scale_applied), float(layer.stats.std_within_rows.nanmean())
    given, freezes = scale * norms * layer.head_dim**-0.5, freezing_point(round(keys))
    is_cosine = norms < UNIT_LENGTH and scale <= PUBLISHED_COSINE
    if is_cosine or min(given, spread) <= freezes:
        return
    better = layer.head_dim**0.5 / max(norms, 1e-300)
    yield Finding(
        layer.name,
        None,
        "qk_norm_freezes",
        "warning",
        f"Normalised queries and keys are multiplied by {scale:.3g}, which spreads scores of random directions by "
        f"{given:.3g} over {keys:.0f} keys, where softmax freezes at {freezes:.3g}.",
        given,
        freezes,
        f"Start at {better:.3g}, which spreads them by one.",
    )
