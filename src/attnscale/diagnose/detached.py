"""Queries or keys that no gradient reaches, or that pass none on to the projections that made them."""

from collections.abc import Iterator

from attnscale.diagnose.finding import Finding
from attnscale.watching.layer import Layer


def detached_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """`no_gradient`: detach() between a projection and the product; or a backward pass that reached one side alone."""
    cut = layer.reading.detached
    if cut:
        message = (
            f"The {' and '.join(cut)} are detached from their projection: no gradient reaches it, and it stays as it "
            "was initialised."
        )
        yield _finding(
            layer,
            "warning",
            message,
            "Drop the detach(); where the projection is to stay frozen, freeze its parameters.",
        )
        return
    reached = {"queries": layer.query_gradient is not None, "keys": layer.key_gradient is not None}
    if sum(reached.values()) == 1:
        (got,), (missed,) = (
            [name for name, is_reached in reached.items() if is_reached is side] for side in (True, False)
        )
        message = (
            f"A gradient reached the {got}, and none the {missed}: they are computed without one, or all is frozen."
        )
        advice = (
            f"Look for no_grad() or .data around what makes the {missed}; frozen parameters are fine if they are meant."
        )
        yield _finding(layer, "note" if trained else "warning", message, advice)


def _finding(layer: Layer, severity: str, message: str, advice: str) -> Finding:
    return Finding(layer.name, None, "no_gradient", severity, message, None, None, advice)
