"""Queries or keys that are cut off from the projections that made them."""

from collections.abc import Iterator

from attnscale.diagnose.finding import Finding
from attnscale.watching.layer import Layer


def detached_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """`no_gradient`: detach() between a projection and the product."""
    cut = layer.reading.detached
    if cut:
        yield Finding(
            layer.name,
            None,
            "no_gradient",
            "warning",
            f"The {' and '.join(cut)} are detached from their projection: no gradient reaches it, and it stays as it "
            "was initialised.",
            None,
            None,
            "Drop the detach(); where the projection is to stay frozen, freeze its parameters.",
        )
