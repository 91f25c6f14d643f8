"""What one pass over the scores of a row leaves behind: enough for every statistic of its softmax, and mergeable."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowSums:
    """Sums over the visible keys of each row, (batch, heads, rows), relative to the row's maximum.

    Relative, so that scores of 10,000 lose no more digits than scores of one. A row that sees nothing has
    `visible` 0 and is counted out.
    """

    visible: Tensor  # n, the number of visible keys
    max: Tensor  # m, the largest score
    total: Tensor  # l = Σ e^{s−m}
    gap: Tensor  # Σ e^{s−m} (m−s) / l, how far below the maximum the weights look on average
    participation: Tensor  # Σ e^{2(s−m)} / l² = Σ p²
    mean: Tensor  # of the scores,
    deviation: Tensor  # and Σ (s − mean)², in float64 where float32 may not reach

    @property
    def entropy(self) -> Tensor:
        """H = ln l + E_p[m − s], nats."""
        return torch.log(self.total.double()) + self.gap

    @property
    def top1(self) -> Tensor:
        """The largest weight, 1/l."""
        return 1.0 / self.total.double()

    @property
    def lse(self) -> Tensor:
        """Ln Σ e^s."""
        return self.max + torch.log(self.total)

    def merge_keys(self, other: "RowSums") -> "RowSums":
        """The same rows over the keys of both: how context-parallel ranks, each with its own keys, become one."""
        pairs = ((getattr(self, name.name), getattr(other, name.name)) for name in fields(self))
        return RowSums(*map(torch.stack, pairs)).over_shards()

    def over_shards(self) -> "RowSums":
        """Rows that saw their keys in shards, (shards, batch, heads, rows), over all of them."""
        seen = self.visible > 0  # a shard in which a row sees nothing has no maximum, and weighs nothing
        highest = torch.where(seen, self.max, -torch.inf).amax(0)
        below = torch.where(seen, highest - self.max, 0.0)
        weight = torch.where(seen, self.total * torch.exp(-below), 0.0)
        total = weight.sum(0)
        safe = torch.where(total == 0, 1.0, total)
        visible = self.visible.sum(0)
        first = (
            torch.where(seen, self.mean, -torch.inf).amax(0).nan_to_num(neginf=0.0)
        )  # near every mean: less rounding
        apart = torch.where(seen, self.mean - first, 0.0)
        mean = (apart * self.visible).sum(0) / visible.clamp(min=1)
        return RowSums(
            visible=visible,
            max=highest,
            total=total,
            gap=(torch.where(seen, self.gap + below, 0.0) * weight).sum(0) / safe,
            participation=(torch.where(seen, self.participation, 0.0) * weight.square()).sum(0) / safe.square(),
            mean=first + mean,
            deviation=(torch.where(seen, self.deviation + self.visible * (apart - mean).double().square(), 0.0)).sum(0),
        )
