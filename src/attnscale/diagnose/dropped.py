"""Dropout of scores, before the softmax."""

from collections.abc import Iterator

from attnscale.diagnose.finding import Finding
from attnscale.watching.layer import Layer


def dropout_findings(layer: Layer, trained: bool) -> Iterator[Finding]:
    """`dropout_before_softmax`: seen in training mode alone, since nothing is dropped in evaluation."""
    if layer.reading.dropped:
        yield Finding(
            layer.name,
            None,
            "dropout_before_softmax",
            "warning",
            "Scores are dropped before the softmax: a score of zero is no weight of zero, and the others are "
            "multiplied by 1/(1 − p), which sharpens them in training alone.",
            None,
            None,
            "Apply dropout to the weights, after the softmax.",
        )
