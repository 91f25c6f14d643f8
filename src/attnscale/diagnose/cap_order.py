"""A soft-cap and a scale in the wrong order."""

from collections.abc import Iterator

from attnscale.diagnose.finding import Finding
from attnscale.watching.layer import Layer

SAME = 0.01  # relative: a scale that is 1/√d_k


def cap_order_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """`softcap_before_scale`: q·k is capped, and what is left of it multiplied by 1/√d_k."""
    after, cap, usual = layer.reading.scale_after_cap, layer.softcap, layer.head_dim**-0.5
    if after is None or cap is None or abs(abs(after) - usual) > SAME * usual:
        return
    yield Finding(
        layer.name,
        None,
        "softcap_before_scale",
        "warning",
        f"q·k is capped at {cap / abs(after):.3g} and multiplied by 1/√d_k = {usual:.3g} afterwards, so scores are "
        f"capped at {cap:.3g}.",
        cap,
        cap / abs(after),
        "Scale first: cap · tanh(q·k/√d_k / cap).",
    )
