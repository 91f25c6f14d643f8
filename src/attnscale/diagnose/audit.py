"""audit: watch one forward pass of a model, and say what is wrong with its attention."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attnscale.diagnose.checks import all_findings
from attnscale.diagnose.finding import Finding, severity_rank, worst
from attnscale.diagnose.verdict import Verdict, head_verdicts, layer_verdict, verdict_word
from attnscale.diagnose.what_if import WhatIf, what_if_calls
from attnscale.errors import SettingError
from attnscale.plain import printable
from attnscale.watching.layer import Layer
from attnscale.watching.seen import table

NOTHING_READ = "No attention could be read, so nothing was judged."


@dataclass(frozen=True)
class Audit:
    """What was seen of a model's attention, and what is to be said about it."""

    layers: Mapping[str, Layer]
    trained: bool
    findings: list[Finding]  # the worst first, then by layer
    unchecked: tuple[str, ...] = ()  # a sentence each: what was not looked at, and why
    unjudged: str = ""  # why nothing is concluded from what the scores are like; empty where it is

    @property
    def worst(self) -> str | None:
        """The worst severity found; None where nothing was."""
        return worst(self.findings)

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """Layer by layer, the mean of its heads."""
        found = ((name, layer_verdict(layer)) for name, layer in self.layers.items())
        return {name: verdict for name, verdict in found if verdict is not None}

    @property
    def words(self) -> dict[str, str]:
        """Layer by layer, its verdict in one word: as in JSON, in tables and in reports."""
        return {name: verdict_word(layer, self.findings) for name, layer in self.layers.items()}

    @property
    def past_freezing(self) -> int:
        """Heads whose spread is beyond the freezing point, whatever of the gradient passes."""
        return sum(head.is_past_freezing for layer in self.layers.values() for head in head_verdicts(layer))

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
        words = self.words
        return {
            "trained": self.trained,
            "worst": self.worst,
            "findings": [finding.to_dict() for finding in self.findings],
            "unchecked": list(self.unchecked),
            "unjudged": self.unjudged,
            "layers": {name: _layer_dict(layer) | {"verdict": words[name]} for name, layer in self.layers.items()},
        }

    def __str__(self) -> str:
        count = len(self.layers)
        shown = [table(self.layers.values(), self.words), ""] if count else []
        where = f"{count} attention layer{'s' * (count != 1)}"
        found = [str(finding) for finding in self.findings] or [f"Nothing found in {where}." if count else NOTHING_READ]
        unsaid = [self.unjudged] if self.unjudged else []
        return "\n".join([*shown, *found, *unsaid, *map(printable, self.unchecked)])

    def _layer(self, name: str) -> Layer:
        if name not in self.layers:
            raise SettingError(f"No layer {name!r} was seen. Expected one of: {', '.join(self.layers)}.")
        return self.layers[name]


def diagnose(layers: Mapping[str, Layer], *, trained: bool) -> Audit:
    """Diagnose layers that were watched before; `trained` as is_trained() says of their model."""
    return Audit(layers, trained, in_order(all_findings(layers, trained), layers))


def in_order(findings: Iterable[Finding], layers: Mapping[str, Layer]) -> list[Finding]:
    """The worst first, then by layer."""
    order = {name: position for position, name in enumerate(layers)}
    return sorted(findings, key=lambda found: (-severity_rank(found.severity), order.get(found.layer, len(order))))


def _layer_dict(layer: Layer) -> dict[str, Any]:
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
        "stats": layer.stats.to_dict(),
    }
