"""The checks: every one looks at a layer, or at all layers of a model, and yields what it finds.

A new check is a file with one function, and one line here.
"""

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from attnscale.diagnose.cap_order import cap_order_findings
from attnscale.diagnose.detached import detached_findings
from attnscale.diagnose.dropped import dropout_findings
from attnscale.diagnose.finding import Finding
from attnscale.diagnose.future import future_findings
from attnscale.diagnose.noop import noop_findings
from attnscale.diagnose.normed import normed_findings
from attnscale.diagnose.pairing import pairing_findings
from attnscale.diagnose.reached import reached
from attnscale.diagnose.scale import scale_findings
from attnscale.diagnose.scores import verdict_findings
from attnscale.diagnose.weights import weight_findings
from attnscale.watching.layer import Layer

# Of a layer by itself, and whether its model is trained.
CHECKS: tuple[Callable[[Layer, bool], Iterator[Finding]], ...] = (
    scale_findings,
    noop_findings,
    weight_findings,
    dropout_findings,
    cap_order_findings,
    pairing_findings,
    detached_findings,
    normed_findings,
)
# Of a layer beside the others.
COMPARISONS: tuple[Callable[[Mapping[str, Layer], bool], Iterator[Finding]], ...] = (future_findings,)


def all_findings(layers: Mapping[str, Layer], trained: bool) -> Iterator[Finding]:
    """Everything there is to say of the layers of a model."""
    gradients = reached(layers)
    for name, layer in layers.items():
        yield from findings_of(layer, trained, gradients.get(name))
    for compare in COMPARISONS:
        yield from compare(layers, trained)


def findings_of(layer: Layer, trained: bool, gradient: Tensor | None = None) -> Iterator[Finding]:
    """Everything there is to say of one layer by itself; `gradient` as reached() has it."""
    verdicts = list(verdict_findings(layer, trained, gradient))
    yield from verdicts
    if any(finding.code == "non_finite" for finding in verdicts):
        return  # nothing else can be read from its scores
    for check in CHECKS:
        yield from check(layer, trained)
