"""audit: watch one forward pass of a model, and say what is wrong with its attention."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attnscale.diagnose.finding import Finding, severity_rank, worst
from attnscale.diagnose.maturity import is_trained
from attnscale.diagnose.noop import noop_findings
from attnscale.diagnose.scale import scale_findings
from attnscale.diagnose.verdict import Verdict, head_verdicts, layer_verdict, verdict_findings
from attnscale.diagnose.what_if import WhatIf, what_if_calls
from attnscale.errors import SettingError
from attnscale.watching import watch
from attnscale.watching.layer import Layer


@dataclass(frozen=True)
class Audit:
    """What was seen of a model's attention, and what is to be said about it."""

    layers: Mapping[str, Layer]
    trained: bool
    findings: list[Finding]  # the worst first, then by layer

    @property
    def worst(self) -> str | None:
        """The worst severity found; None where nothing was."""
        return worst(self.findings)

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """Layer by layer, the mean of its heads."""
        found = ((name, layer_verdict(layer)) for name, layer in self.layers.items())
        return {name: verdict for name, verdict in found if verdict is not None}

    def head_verdicts(self, layer: str) -> list[Verdict]:
        """Head by head, of one layer."""
        return head_verdicts(self._layer(layer))

    def what_if(self, layer: str, candidates: Mapping[str, Any] | None = None, rows: int | None = None) -> WhatIf:
        """What every rule would do to the layer, over all of its calls and sequences.

        Soft-cap, bias, masks and values are the layer's own; `current` is what was measured. Where it could not be read
        which values its weights met, the change of the output is NaN.
        """
        seen = self._layer(layer)
        if not seen.kept or len(seen.kept) < seen.calls:
            raise SettingError(f"The queries and keys of {layer!r} were not kept; watch with keep=True to try others.")
        return what_if_calls(seen.kept, candidates, rows, seen.stats)

    def to_dict(self) -> dict[str, Any]:
        """The audit as JSON takes it."""
        return {
            "trained": self.trained,
            "worst": self.worst,
            "findings": [finding.to_dict() for finding in self.findings],
            "layers": {name: _layer_dict(layer) for name, layer in self.layers.items()},
        }

    def __str__(self) -> str:
        if not self.findings:
            return f"Nothing found in {len(self.layers)} attention layers."
        return "\n".join(map(str, self.findings))

    def _layer(self, name: str) -> Layer:
        if name not in self.layers:
            raise SettingError(f"No layer {name!r} was seen. Expected one of: {', '.join(self.layers)}.")
        return self.layers[name]


def audit(model: nn.Module, *args: Any, **kwargs: Any) -> Audit:
    """Run the model once, as model(*args, **kwargs), and diagnose every attention that was seen."""
    with torch.no_grad(), watch(model, rows=None, keep=True) as seen:
        model(*args, **kwargs)
    return diagnose(seen.layers, trained=is_trained(model))


def diagnose(layers: Mapping[str, Layer], *, trained: bool) -> Audit:
    """Diagnose layers that were watched before; `trained` as is_trained() says of their model."""
    order = {name: position for position, name in enumerate(layers)}
    findings = [finding for layer in layers.values() for finding in findings_of(layer, trained)]
    findings.sort(key=lambda found: (-severity_rank(found.severity), order.get(found.layer, len(order))))
    return Audit(layers, trained, findings)


def findings_of(layer: Layer, trained: bool) -> Iterator[Finding]:
    """Everything there is to say of one layer."""
    verdicts = list(verdict_findings(layer, trained))
    yield from verdicts
    if any(finding.code == "non_finite" for finding in verdicts):
        return  # nothing else can be read from its scores
    yield from scale_findings(layer, trained)
    yield from noop_findings(layer)


def _layer_dict(layer: Layer) -> dict[str, Any]:
    verdict = layer_verdict(layer)
    return {
        "kind": layer.kind,
        "heads": layer.heads,
        "kv_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "causal": layer.causal,
        "softcap": layer.softcap,
        "calls": layer.calls,
        "queries": layer.queries,
        "padding": layer.padding,
        "scale_applied": layer.scale_applied,
        "scale_expected": layer.scale_expected,
        "verdict": None if verdict is None else verdict.verdict,
        "stats": layer.stats.to_dict(),
    }
