"""What a head looks at: itself, the token before, an offset, one key for all queries, a few, or what it finds there."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnscale.watching.layer import Layer

MOST = 0.5  # of the weight: what takes more is what a head does
FEW_KEYS = 4  # visible to a row; of fewer, any takes much
FEW_ROWS = 4  # of fewer, what one query does is no habit; where each has keys of its own, only one is shown
FEW = 1 / 8  # of all keys


@dataclass(frozen=True)
class Habit:
    """Where most of a head's weight goes, and how much of it; `by content` where no place tells."""

    kind: str  # "itself", "previous token", "offset", "sink", "separator", "few keys", "by content"
    share: float  # of the weight, over rows
    places: tuple[int, ...] = ()  # the offset, or the keys

    def __str__(self) -> str:
        where = {
            "itself": "on the token itself",
            "previous token": "on the token before",
            "offset": f"at an offset of {self.places[0]:+d}" if self.places else "",
            "sink": f"on key {self.places[0]} from wherever, a sink" if self.places else "",
            "separator": f"on one token that recurs, a separator (keys {_listed(self.places)})",
            "few keys": f"on keys {_listed(self.places)} from wherever",
            "by content": "by content: no position takes most of it",
        }[self.kind]
        return f"{self.share:.2f} of its weight lies {where}" if self.kind != "by content" else f"It looks {where}"


def habit_of(layer: Layer, head: int) -> Habit | None:
    """What a head of a watched layer does in its first sequence; None where too little was kept to tell."""
    if not layer.kept:
        return None
    weights = layer.weights(head)
    return habit(weights, layer.tokens, causal=layer.causal) if len(weights) >= FEW_ROWS else None


def habit(weights: Tensor, tokens: Tensor | None = None, *, causal: bool = False) -> Habit:
    """What the head does whose weights over one sequence these are, (queries, keys); `tokens` are the keys' ids.

    Queries are the last of the sequence where there are fewer of them than keys. Rows that see few keys are left out.

    >>> habit(torch.eye(6)).kind, habit(torch.eye(6).roll(-1, 1)).places
    ('itself', (-1,))
    """
    queries, keys = weights.shape
    positions = torch.arange(keys - queries, keys, device=weights.device)
    told = positions >= FEW_KEYS - 1 if causal else torch.full_like(positions, keys >= FEW_KEYS, dtype=torch.bool)
    if not told.any():
        return Habit("by content", 0.0)
    seen = weights[told].double()
    by_key = seen.mean(0)
    best_key, best_offset = int(by_key.argmax()), _best_offset(seen, positions[told])
    if max(float(by_key[best_key]), best_offset[1]) >= MOST:
        if best_offset[1] >= float(by_key[best_key]):
            offset, share = best_offset
            kind = {0: "itself", -1: "previous token"}.get(offset, "offset")
            return Habit(kind, share, (offset,))
        return Habit("sink", float(by_key[best_key]), (best_key,))
    top = by_key.topk(max(1, int(FEW * keys)))
    needed = int((top.values.cumsum(0) < MOST).sum()) + 1
    if needed <= len(top.indices):
        places = tuple(sorted(top.indices[:needed].tolist()))
        is_one = tokens is not None and len(tokens) == keys and len({int(tokens[at]) for at in places}) == 1
        return Habit("separator" if is_one else "few keys", float(top.values[:needed].sum()), places)
    return Habit("by content", max(float(by_key[best_key]), best_offset[1]))


def _best_offset(weights: Tensor, positions: Tensor) -> tuple[int, float]:
    """The distance from a query to the key that takes the most weight, over rows, and how much it takes."""
    rows, keys = weights.shape
    offsets = torch.arange(keys, device=weights.device) - positions[:, None]
    lowest = int(offsets.min())
    sums = torch.zeros(int(offsets.max()) - lowest + 1, dtype=weights.dtype, device=weights.device)
    sums.index_add_(0, (offsets - lowest).flatten(), weights.flatten())
    best = int(sums.argmax())
    return best + lowest, float(sums[best]) / rows


def _listed(places: tuple[int, ...]) -> str:
    return ", ".join(map(str, places[:4])) + (" …" if len(places) > 4 else "")
