"""Keys and values that are shared by heads, each in an order of its own."""

from collections.abc import Iterator

from attnscale.diagnose.finding import Finding
from attnscale.watching.layer import Layer


def pairing_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """`heads_mispaired`: a head looks with the key of one group and takes the value of another."""
    if any(softmax.pairs_differ for softmax in layer.softmaxes):
        yield Finding(
            layer.name,
            None,
            "heads_mispaired",
            "warning" if trained else "error",
            f"{layer.heads} heads share {layer.kv_heads} keys in one order and their values in another: a head looks "
            "with the key of one group and takes the value of another.",
            None,
            None,
            "Repeat both alike, by repeat_interleave(heads // kv_heads, dim=1), or let the kernel do it (enable_gqa).",
        )
