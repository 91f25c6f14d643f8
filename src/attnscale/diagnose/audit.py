"""audit: watch one forward pass of a model, and say what is wrong with its attention."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnscale.diagnose.checks import all_findings
from attnscale.diagnose.finding import Finding, severity_rank, worst
from attnscale.diagnose.verdict import Verdict, head_verdicts, layer_verdict, verdict_word
from attnscale.diagnose.what_if import WhatIf, what_if
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
    def past_freezing(self) -> int:
        """Heads whose spread is beyond the freezing point, whatever of the gradient passes."""
        return sum(head.is_past_freezing for layer in self.layers.values() for head in head_verdicts(layer))

    def head_verdicts(self, layer: str) -> list[Verdict]:
        """Head by head, of one layer."""
        return head_verdicts(self._layer(layer))

    def what_if(self, layer: str, candidates: Mapping[str, Any] | None = None, rows: int | None = None) -> WhatIf:
        """What every rule would do to the query and key of the first sequence just seen.

        The scale and the soft-cap are the layer's own. A mask or bias that is not causal is not kept, nor the value:
        the key stands in for it.
        """
        seen = self._layer(layer)
        if seen.query is None or seen.key is None:
            raise SettingError(f"The query and key of {layer!r} were not kept; watch with keep=True to try others.")
        mask = _causal_mask(seen.query, seen.key) if seen.causal else None
        is_causal = seen.causal and mask is None
        scale = seen.scales.nan_to_num(seen.scale_expected).to(seen.query.device).view(-1, 1, 1)
        return what_if(
            seen.query,
            seen.key,
            candidates=candidates,
            attn_mask=mask,
            is_causal=is_causal,
            enable_gqa=seen.heads != seen.kv_heads,
            scale=scale,
            softcap=seen.softcap,
            rows=rows,
        )

    def to_dict(self) -> dict[str, Any]:
        """The audit as JSON takes it."""
        return {
            "trained": self.trained,
            "worst": self.worst,
            "findings": [finding.to_dict() for finding in self.findings],
            "unchecked": list(self.unchecked),
            "unjudged": self.unjudged,
            "layers": {
                name: _layer_dict(layer) | {"verdict": verdict_word(layer, self.findings)}
                for name, layer in self.layers.items()
            },
        }

    def __str__(self) -> str:
        count = len(self.layers)
        shown = [table(self.layers.values()), ""] if count else []
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


def _causal_mask(query: Tensor, key: Tensor) -> Tensor | None:
    """Queries that continue a cache see all of it: their triangle ends with the keys. None where they are as many."""
    queries, keys = query.shape[-2], key.shape[-2]
    if queries == keys:
        return None
    return torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)


def _layer_dict(layer: Layer) -> dict[str, Any]:
    return {
        "kind": layer.kind,
        "heads": layer.heads,
        "kv_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "causal": layer.causal,
        "softcap": layer.softcap,
        "calls": layer.calls,
        "scale_applied": layer.scale_applied,
        "scale_expected": layer.scale_expected,
        "stats": layer.stats.to_dict(),
    }
