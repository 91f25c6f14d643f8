"""Describe where a head looks: at itself, the token before, an offset, one key for all, a few, or by content."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnscale.watching.layer import Layer

MOST = 0.5  # of the weight: a place that takes more is where the head looks
FEW_KEYS = 4  # visible to a row; of fewer, any takes much
FEW_ROWS = 4  # fewer show no pattern; where each query has keys of its own, only one row is known
FEW = 1 / 8  # of all keys


@dataclass(frozen=True)
class Pattern:
    """The place that gets most of a head's weight, and how much of it; `by content` where no place does."""

    kind: str  # "itself", "previous token", "offset", "sink", "separator", "few keys", "by content"
    share: float  # of the weight, over rows
    places: tuple[int, ...] = ()  # the offset, or the keys

    def __str__(self) -> str:
        if self.kind == "by content":
            return "no position takes most of its weight"
        keys = ", ".join(map(str, self.places[:4])) + " …" * (len(self.places) > 4)
        where = {
            "itself": "the token itself",
            "previous token": "the token before",
            "offset": f"the token at an offset of {self.places[0]:+d}",
            "sink": f"key {self.places[0]} for all queries, a sink",
            "separator": f"one token that recurs, a separator (keys {keys})",
            "few keys": f"keys {keys} for all queries",
        }
        return f"{self.share:.0%} of its weight is on {where[self.kind]}"


def pattern_of(layer: Layer, head: int) -> Pattern | None:
    """Return the pattern of a head in the first sequence of a watched layer; None where too little was kept."""
    if not layer.kept:
        return None
    weights = layer.weights(head)
    return attention_pattern(weights, layer.tokens, causal=layer.causal) if len(weights) >= FEW_ROWS else None


def attention_pattern(weights: Tensor, tokens: Tensor | None = None, *, causal: bool = False) -> Pattern:
    """Return the pattern of weights (queries, keys) over one sequence; `tokens` are the ids of its keys.

    Queries are the last of the sequence where there are fewer of them than keys. Rows that see few keys are left out.

    >>> attention_pattern(torch.eye(6)).kind, attention_pattern(torch.eye(6).roll(-1, 1)).places
    ('itself', (-1,))
    """
    queries, keys = weights.shape
    positions = torch.arange(keys - queries, keys, device=weights.device)
    counted = positions >= FEW_KEYS - 1 if causal else torch.full_like(positions, keys >= FEW_KEYS, dtype=torch.bool)
    if not counted.any():
        return Pattern("by content", 0.0)
    rows = weights[counted].double()
    by_key = rows.mean(0)
    best_key, best_offset = int(by_key.argmax()), _best_offset(rows, positions[counted])
    if max(float(by_key[best_key]), best_offset[1]) >= MOST:
        if best_offset[1] >= float(by_key[best_key]):
            offset, share = best_offset
            kind = {0: "itself", -1: "previous token"}.get(offset, "offset")
            return Pattern(kind, share, (offset,))
        return Pattern("sink", float(by_key[best_key]), (best_key,))
    top = by_key.topk(max(1, int(FEW * keys)))
    needed = int((top.values.cumsum(0) < MOST).sum()) + 1
    if needed <= len(top.indices):
        places = tuple(sorted(top.indices[:needed].tolist()))
        is_one = tokens is not None and len({int(tokens[place]) for place in places}) == 1
        return Pattern("separator" if is_one else "few keys", float(top.values[:needed].sum()), places)
    return Pattern("by content", max(float(by_key[best_key]), best_offset[1]))


def _best_offset(weights: Tensor, positions: Tensor) -> tuple[int, float]:
    """Return the offset from query to key that takes the most weight, over rows, and how much it takes."""
    rows, keys = weights.shape
    offsets = torch.arange(keys, device=weights.device) - positions[:, None]
    lowest = int(offsets.min())
    sums = torch.zeros(int(offsets.max()) - lowest + 1, dtype=weights.dtype, device=weights.device)
    sums.index_add_(0, (offsets - lowest).flatten(), weights.flatten())
    best = int(sums.argmax())
    return best + lowest, float(sums[best]) / rows
