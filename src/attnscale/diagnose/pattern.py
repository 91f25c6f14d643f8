"""Describe the positions that a head attends to: itself, the previous token, an offset, a sink, or by content."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnscale.watching.layer import Layer

MOST = 0.5  # share of the weight above which a position defines the pattern
FEW_KEYS = 4  # rows that see fewer keys are skipped: any key gets a large share there
FEW_ROWS = 4  # fewer rows show no pattern; if each query has its own keys, there is only one row
FEW = 1 / 8  # share of all keys that counts as few


@dataclass(frozen=True)
class Pattern:
    """Position that gets most of a head's weight, and its share; `by content` if there is none."""

    kind: str  # "itself", "previous token", "offset", "sink", "separator", "few keys", "by content"
    share: float  # share of the weight, mean over rows
    places: tuple[int, ...] = ()  # offset or key positions

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
    """Return the pattern of a head in the first sequence of a watched layer; None if too few rows were kept."""
    if not layer.kept:
        return None
    weights = layer.weights(head)
    return attention_pattern(weights, layer.tokens, causal=layer.causal) if len(weights) >= FEW_ROWS else None


def attention_pattern(weights: Tensor, tokens: Tensor | None = None, *, causal: bool = False) -> Pattern:
    """Return the pattern of weights (queries, keys) over one sequence; `tokens` are the ids of its keys.

    If there are fewer queries than keys, they are at the end of the sequence. Rows that see few keys are ignored.

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
    key, key_share = int(by_key.argmax()), float(by_key.max())
    offset, offset_share = _best_offset(rows, positions[counted])
    if offset_share >= max(MOST, key_share):
        kind = {0: "itself", -1: "previous token"}.get(offset, "offset")
        return Pattern(kind, offset_share, (offset,))
    if key_share >= MOST:
        return Pattern("sink", key_share, (key,))
    top = by_key.topk(max(1, int(FEW * keys)))
    needed = int((top.values.cumsum(0) < MOST).sum()) + 1
    if needed <= len(top.indices):
        places = tuple(sorted(top.indices[:needed].tolist()))
        is_one = tokens is not None and len({int(tokens[place]) for place in places}) == 1
        return Pattern("separator" if is_one else "few keys", float(top.values[:needed].sum()), places)
    return Pattern("by content", max(key_share, offset_share))


def _best_offset(weights: Tensor, positions: Tensor) -> tuple[int, float]:
    """Return the offset from query to key with the largest mean weight over rows, and this weight."""
    rows, keys = weights.shape
    offsets = torch.arange(keys, device=weights.device) - positions[:, None]
    lowest = int(offsets.min())
    sums = torch.zeros(int(offsets.max()) - lowest + 1, dtype=weights.dtype, device=weights.device)
    sums.index_add_(0, (offsets - lowest).flatten(), weights.flatten())
    best = int(sums.argmax())
    return best + lowest, float(sums[best]) / rows
