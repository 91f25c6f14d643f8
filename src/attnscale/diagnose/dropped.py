"""Dropout where it does not belong: of scores, before the softmax; of weights, in evaluation."""

from collections.abc import Iterator, Mapping

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


def evaluation_findings(layers: Mapping[str, Layer]) -> Iterator[Finding]:
    """`dropout_in_evaluation`, of layers that were seen while no module was in training mode."""
    for layer in layers.values():
        if any(softmax.drops for softmax in layer.softmaxes):
            yield Finding(
                layer.name,
                None,
                "dropout_in_evaluation",
                "warning",
                "Weights are dropped at random in evaluation mode too: the same input gives another output each time.",
                None,
                None,
                "Drop in training alone: dropout_p=p if self.training else 0.0, or nn.Dropout, which knows the mode.",
            )
