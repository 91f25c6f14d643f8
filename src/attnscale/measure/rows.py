"""What one pass over the scores of a row leaves behind: enough for every statistic of its softmax, and mergeable."""

from dataclasses import dataclass, replace

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
    deviation: Tensor  # and Σ (s − mean)²

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
        """ln Σ e^s."""
        return self.max + torch.log(self.total)

    def merge_keys(self, other: "RowSums") -> "RowSums":
        """The same rows over the keys of both: how context-parallel ranks, each with its own keys, become one."""
        highest = torch.maximum(self.max, other.max)
        # A shard in which a row sees nothing has no maximum, and weighs nothing.
        parts = [part._rescaled(torch.where(highest.isneginf(), part.max, highest)) for part in (self, other)]
        total = parts[0].total + parts[1].total
        safe = torch.where(total == 0, 1.0, total)
        count = (self.visible + other.visible).to(total.dtype)
        share = other.visible / count.clamp(min=1)
        apart = torch.where((self.visible > 0) & (other.visible > 0), other.mean - self.mean, 0.0)
        return RowSums(
            visible=self.visible + other.visible,
            max=highest,
            total=total,
            gap=(parts[0].gap * parts[0].total + parts[1].gap * parts[1].total) / safe,
            participation=(parts[0].participation * parts[0].total ** 2 + parts[1].participation * parts[1].total ** 2)
            / safe**2,
            mean=torch.where(self.visible > 0, self.mean, other.mean) + apart * share,
            deviation=self.deviation + other.deviation + apart**2 * self.visible * share,
        )

    def _rescaled(self, highest: Tensor) -> "RowSums":
        """The same sums relative to a maximum that may lie above the row's own."""
        below = torch.where(self.max.isneginf(), 0.0, highest - self.max)
        factor = torch.where(self.max.isneginf(), 0.0, torch.exp(-below))
        gap, participation = (torch.where(self.visible > 0, x, 0.0) for x in (self.gap, self.participation))
        return replace(self, max=highest, total=self.total * factor, gap=gap + below, participation=participation)
