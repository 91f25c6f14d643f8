"""Sums over the visible keys of each row: enough for every statistic of its softmax, and mergeable over keys."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

VANISHED = -1e4  # replaces a logit of −∞: exp gives zero too, but −∞ times zero is NaN


@dataclass(frozen=True)
class RowSums:
    """Sums over the visible keys of each row, (batch, heads, rows), relative to the row's maximum.

    Relative sums of scores of 10,000 lose no more digits than those of scores of one. A row without visible keys has
    `visible` 0, and every statistic excludes it.
    """

    visible: Tensor  # n, the number of visible keys
    max: Tensor  # m, the largest score
    total: Tensor  # l = Σ e^{s−m}
    gap: Tensor  # Σ e^{s−m} (m−s) / l, the weighted mean distance from the maximum
    participation: Tensor  # Σ e^{2(s−m)} / l² = Σ p²
    mean: Tensor  # mean score
    deviation: Tensor  # Σ (s − mean)², in float64 if float32 may overflow
    first: Tensor  # s₁ − m, with s₁ the score of the first visible key
    learned_sink: Tensor | None = None  # weight of the learned sink; None if m and l cover the keys only

    @property
    def entropy(self) -> Tensor:
        """Entropy in nats, H = ln l + E_p[m − s]."""
        return torch.log(self.total.double()) + self.gap

    @property
    def top1(self) -> Tensor:
        """Largest weight, 1/l."""
        return 1.0 / self.total.double()

    @property
    def sink(self) -> Tensor:
        """Weight of the first visible key, e^{s₁ − m} / l."""
        return torch.exp(self.first.double()) / self.total.double()

    @property
    def outcomes(self) -> Tensor:
        """Number of weights that sum to one: visible keys, plus one for a learned sink."""
        return self.visible if self.learned_sink is None else self.visible + 1

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of the scores over the keys, ln Σ e^s."""
        assert self.learned_sink is None, "l is relative to the largest logit, which may be the sink's"
        return self.max + torch.log(self.total)

    def with_sinks(self, logits: Tensor) -> "RowSums":
        """Add one virtual key to every row, with the learned logit of its head, (heads,), as its score.

        Its weight counts in the entropy, the largest weight, Σp² and the denominator of every other weight. It does
        not change the maximum, mean and variance of the scores.
        """
        above = logits.detach().to(self.total.dtype).unsqueeze(-1) - self.max
        raised, below = above.clamp(min=0.0), above.clamp(VANISHED, 0.0)  # increase of the largest logit; b − m
        keys, own = self.total * torch.exp(-raised), torch.exp(below)
        total = keys + own
        return replace(
            self,
            total=total,
            gap=(torch.where(keys > 0, keys * (self.gap + raised), 0.0) - own * below) / total,
            participation=(self.participation * keys.square() + own.square()) / total.square(),
            first=self.first - raised,
            learned_sink=own / total,
        )

    def over_shards(self) -> "RowSums":
        """Merge rows with sharded keys, (shards, batch, heads, rows); shards are in the order of the keys."""
        seen = self.visible > 0  # a shard without visible keys has no maximum, and gets weight zero
        highest = torch.where(seen, self.max, -torch.inf).amax(0)
        below = torch.where(seen, highest - self.max, 0.0)
        weight = torch.where(seen, self.total * torch.exp(-below), 0.0)
        total = weight.sum(0)
        safe = torch.where(total == 0, 1.0, total)
        visible = self.visible.sum(0)
        near = torch.where(seen, self.mean, -torch.inf).amax(0).nan_to_num(neginf=0.0)  # subtracted for less rounding
        apart = torch.where(seen, self.mean - near, 0.0)
        mean = (apart * self.visible).sum(0) / visible.clamp(min=1)
        earliest = seen.to(torch.uint8).argmax(0, keepdim=True)  # first shard with a visible key
        return RowSums(
            visible=visible,
            max=highest,
            total=total,
            gap=(torch.where(seen, self.gap + below, 0.0) * weight).sum(0) / safe,
            participation=(torch.where(seen, self.participation, 0.0) * weight.square()).sum(0) / safe.square(),
            mean=near + mean,
            deviation=(torch.where(seen, self.deviation + self.visible * (apart - mean).double().square(), 0.0)).sum(0),
            first=(self.first - below).gather(0, earliest).squeeze(0),
        )


ROW_FIELDS = tuple(each.name for each in fields(RowSums) if each.name != "learned_sink")  # fields that a pass fills


def joined_rows(parts: list[RowSums]) -> RowSums:
    """Concatenate the rows of all parts."""
    if len(parts) == 1:
        return parts[0]
    names = ROW_FIELDS if parts[0].learned_sink is None else (*ROW_FIELDS, "learned_sink")
    return RowSums(**{name: torch.cat([getattr(part, name) for part in parts], dim=-1) for name in names})
