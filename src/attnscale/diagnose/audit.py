"""Audit: the layers of a model as they were watched, and the findings about them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attnscale.diagnose.checks import all_findings
from attnscale.diagnose.finding import Finding, severity_rank, worst
from attnscale.diagnose.verdict import head_verdicts, verdict_text, verdict_word
from attnscale.diagnose.what_if import WhatIf, what_if_calls
from attnscale.errors import SettingError
from attnscale.plain import printable
from attnscale.results import PlottedResult
from attnscale.watching.layer import Layer
from attnscale.watching.missed import MissedAttention
from attnscale.watching.seen import table

NOTHING_READ = "No attention could be read, so nothing was judged."


@dataclass(frozen=True, repr=False)
class Audit(PlottedResult):
    """The attention layers of a model, and the findings about them."""

    layers: Mapping[str, Layer]
    trained: bool
    findings: list[Finding]  # the worst first, then by layer
    unchecked: tuple[str, ...] = ()  # a sentence each: what was not checked, and why
    unjudged: str = ""  # why the scores were not judged; empty where they were
    forward_passes: int = 1  # of the model that were watched; the second is in its other mode

    @property
    def worst(self) -> str | None:
        """The worst severity found; None where there are no findings."""
        return worst(self.findings)

    @property
    def words(self) -> dict[str, str]:
        """The verdict on each layer in one word, as in JSON, tables and reports."""
        return {name: verdict_word(layer, self.findings) for name, layer in self.layers.items()}

    @property
    def past_critical_spread(self) -> int:
        """Number of heads whose spread is beyond the critical spread."""
        return sum(head.is_past_critical_spread for layer in self.layers.values() for head in head_verdicts(layer))

    def what_if(self, layer: str, candidates: Mapping[str, Any] | None = None, rows: int | None = None) -> WhatIf:
        """Compute what every rule would do to the layer, over all of its calls and sequences.

        Soft-cap, bias, masks and values are the layer's own; `current` is what was measured. The change of the output
        is NaN where the values could not be read.
        """
        seen = self._layer(layer)
        if not seen.kept or len(seen.kept) < seen.calls:
            raise SettingError(f"The queries and keys of {layer!r} were not kept; watch with keep=True to try others.")
        return what_if_calls(seen.kept, candidates, rows, seen.stats)

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as plain values for JSON."""
        words = self.words
        return {
            "trained": self.trained,
            "worst": self.worst,
            "findings": [finding.to_dict() for finding in self.findings],
            "unchecked": list(self.unchecked),
            "unjudged": self.unjudged,
            "forward_passes": self.forward_passes,
            "layers": {name: _layer_dict(layer) | {"verdict": words[name]} for name, layer in self.layers.items()},
        }

    def __str__(self) -> str:
        count = len(self.layers)
        words = {name: verdict_text(layer, self.findings, self.trained) for name, layer in self.layers.items()}
        shown = [table(self.layers.values(), words), ""] if count else []
        where = f"{count} attention layer{'s' * (count != 1)}"
        checked = (
            f"Not all was checked of {where}; the rest is fine." if self.unchecked else f"Nothing found in {where}."
        )
        found = [str(finding) for finding in self.findings] or [checked if count else NOTHING_READ]
        unsaid = [self.unjudged] if self.unjudged else []
        return "\n".join([*shown, *found, *unsaid, *map(printable, self.unchecked)])

    def _layer(self, name: str) -> Layer:
        if name not in self.layers:
            raise SettingError(f"No layer {name!r} was seen. Expected one of: {', '.join(self.layers)}.")
        return self.layers[name]


def diagnose(layers: Mapping[str, Layer], *, trained: bool) -> Audit:
    """Diagnose layers that were watched before; `trained` as is_trained() returns for their model."""
    return Audit(layers, trained, in_order(all_findings(layers, trained), layers))


def in_order(findings: Iterable[Finding], layers: Mapping[str, Layer]) -> list[Finding]:
    """Sort findings: the worst first, then by layer."""
    order = {name: position for position, name in enumerate(layers)}
    return sorted(findings, key=lambda found: (-severity_rank(found.severity), order.get(found.layer, len(order))))


def unchecked(layers: Mapping[str, Layer], missed: MissedAttention) -> tuple[str, ...]:
    """Return a sentence for everything that was not judged: attention in no layer, multipliers, biases and weights."""
    reasons: dict[str, list[str]] = {}
    for name, layer in layers.items():
        for sentence in _not_judged(layer):
            reasons.setdefault(sentence, []).append(name)
    return (*missed.sentences, *(why.format(", ".join(names)) for why, names in reasons.items()))


def _not_judged(layer: Layer) -> Iterator[str]:
    """Yield sentences with a place for the names of layers."""
    if layer.reading.unread:
        yield f"The scale of {{}} could not be read: {layer.reading.unread}."
    elif layer.declared.folded is not None:
        yield f"The scale of {{}} was not judged: {layer.declared.folded:.4g} of it was folded into its weights."
    elif layer.reading.learned_factor:
        yield "The scale of {} is learned, so its value was not judged."
    if layer.wiring.biased:
        yield "A bias is added to the scores of {}, and was not judged."
    if any(each.is_obscure for each in layer.softmaxes):
        yield "It was not checked that the weights of {} sum to one: they are mixed with others."


def _layer_dict(layer: Layer) -> dict[str, Any]:
    names = (
        "kind", "heads", "kv_heads", "head_dim", "causal", "softcap", "calls", "queries", "padding", "scale_applied",
        "scale_expected", "scale_source",
    )  # fmt: skip
    return {name: getattr(layer, name) for name in names} | {"stats": layer.stats.to_dict()}
