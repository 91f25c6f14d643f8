"""Rows sampled without replacement, in strata of neighbouring positions.

Rows with an unusually large predicted variance are always included. On a CPU, rows are drawn from all batch entries
together. GPU kernels draw equally many rows from each entry. Hand-written attention uses the same rows of
every entry, as a cluster sample.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.uncertainty import foreseen_error
from attnscale.numerics import is_surely_finite, wide_dtype

ROWS_A_STRATUM = 3  # enough to estimate the variance between neighbouring positions
LEAST_POSITIONS = 2  # one position gives no variance between rows
CERTAIN_SHARE = 4  # if rows see different numbers of keys, 1/4 of the sampled rows are the first positions
OUTLIER_SHARE = 8  # at most 1/8 of the sampled rows are predicted outliers
OUTLIER_RATIO = 3.0  # an outlier has at least 3 times the mean predicted variance of a row
FORESEEN_KEYS = 256  # keys used for the prediction: enough to find outliers, and cheaper than measuring rows
SOURCE = np.random.default_rng(0)  # separate generator: measuring must not change the random numbers of training


@dataclass(frozen=True)
class Sample:
    """Sampled positions, the stratum of each, and the number of positions in each stratum."""

    positions: Tensor  # (rows,), or (batch, rows) if they differ by batch entry
    stratum: Tensor  # (rows,)
    sizes: Tensor  # (strata,)
    entries: Tensor | None = None  # (rows,), batch entry of each row; None if the sample applies to every entry
    foreseen: Callable[[], Tensor] | None = None  # cumulants of the variance predicted for all rows

    @property
    def length(self) -> int:
        """Total number of positions."""
        return int(self.sizes.sum())

    @property
    def weights(self) -> Tensor:
        """Number of positions that each sampled position represents."""
        taken = torch.bincount(self.stratum, minlength=len(self.sizes)).clamp(min=1)
        return (self.sizes / taken)[self.stratum]

    def by_stratum(self, quantity: Tensor) -> Tensor:
        """Reshape (batch, heads, rows) to the rows of of_all_entries(), (heads, rows), or sum over the batch."""
        return quantity.transpose(0, 1).flatten(1) if self.positions.dim() == 2 else quantity.sum(0)

    def of_all_entries(self) -> "Sample":
        """Return one sample with the rows of all batch entries, and separate strata for each entry."""
        if self.positions.dim() == 1:
            return self
        batch, strata = self.positions.shape[0], len(self.sizes)
        stratum = self.stratum + strata * torch.arange(batch, device=self.stratum.device).unsqueeze(-1)
        return Sample(self.positions.flatten(), stratum.flatten(), self.sizes.repeat(batch))


@dataclass(frozen=True)
class Design:
    """Number of positions that are always included, and the strata from which the others are drawn."""

    certain: int
    edges: tuple[int, ...]
    taken: tuple[int, ...]  # number drawn from each stratum

    @cached_property
    def stratum(self) -> Tensor:
        """Stratum of each sampled position, on the CPU; stratum 0 has the positions that are always included."""
        counts = [self.certain, *self.taken]
        return torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int64), counts))

    @cached_property
    def sizes(self) -> Tensor:
        """Number of positions of each stratum."""
        sizes = [self.certain, *(stop - start for start, stop in pairwise(self.edges))]
        return torch.from_numpy(np.array(sizes, dtype=np.int64))

    def draws(self, count: int) -> NDArray[np.int32]:
        """Return `count` draws, (count, rows), in increasing order, by Floyd's algorithm on all strata at once."""
        edges, taken = np.array(self.edges), np.array(self.taken)
        widest = int(taken.max(initial=0))
        chosen = np.full((count, len(taken), widest), -1)
        for step in range(widest):
            # Floyd's step: draw from the first size + 1 positions of each stratum; if already chosen, use the last one.
            size = np.diff(edges) - taken + step
            picked = SOURCE.integers(0, np.maximum(size, 0) + 1, (count, len(taken)))
            met = (chosen[..., :step] == picked[..., None]).any(-1)
            chosen[..., step] = np.where(step < taken, np.where(met, size, picked), -1)
        positions = np.sort(np.where(chosen < 0, -1, chosen + edges[:-1, None]), axis=-1).reshape(count, -1)
        kept = (np.arange(widest) >= widest - taken[:, None]).reshape(-1)
        certain = np.broadcast_to(np.arange(self.certain), (count, self.certain))
        return np.ascontiguousarray(np.concatenate([certain, positions[:, kept]], axis=1), np.int32)

    def draw(self) -> Tensor:
        """Draw positions, in increasing order."""
        with torch.inference_mode(False):  # the tensor may be used outside inference mode
            return torch.from_numpy(self.draws(1)[0].astype(np.int64))

    def sample(self, positions: Tensor) -> Sample:
        """Return a draw with its strata."""
        return Sample(positions, self.stratum, self.sizes)


@lru_cache(maxsize=64)
def design(rows: int, length: int, batch: int, uneven: bool, outliers: int = 0) -> Design | None:
    """Return a design for about `rows` rows per head, spread over position and batch; None to measure every row.

    `uneven` means that rows see different numbers of keys, usually few at the start: the first positions are then
    always included, and strata widen towards the end. `outliers` is the number of outliers to include.
    """
    wanted = max(LEAST_POSITIONS, -(-rows // max(batch, 1)))
    if wanted >= length:
        return None
    certain = (wanted // CERTAIN_SHARE if uneven else 0) + outliers
    strata = max(1, (wanted - certain) // ROWS_A_STRATUM)
    given = [step * (wanted - certain) // strata for step in range(strata + 1)]
    # Each stratum has as many positions as are drawn from it, plus its share of the remaining positions.
    left_over = [int((length - wanted) * (step / strata) ** (2 if uneven else 1)) for step in range(strata + 1)]
    edges = (certain + a + b for a, b in zip(given, left_over, strict=True))
    return Design(certain, tuple(edges), tuple(after - before for before, after in pairwise(given)))


def sample_positions(rows: int, length: int, batch: int, uneven: bool) -> Sample | None:
    """Draw about `rows` rows per head, the same for every batch entry; None to measure every row."""
    planned = design(rows, length, batch, uneven)
    return None if planned is None else planned.sample(planned.draw())


def sample_rows(rows: int, batch: int, length: int, uneven: bool, foreseen: Tensor | None = None) -> Sample | None:
    """Draw about `rows` rows per head from all batch entries together; None to measure every row.

    `foreseen`, (batch, heads, length), is the predicted variance of the scores of each row.
    """
    known = None if foreseen is None else foreseen.permute(1, 2, 0).flatten(1)
    first = None if known is None else _outliers(known, rows // OUTLIER_SHARE)
    certain = 0 if first is None else len(first)
    planned = design(rows, batch * length, 1, uneven, certain)
    if planned is None:
        return None
    order = torch.arange(batch * length)
    if first is not None:
        others = torch.ones(batch * length, dtype=torch.bool).index_fill_(0, first, False)
        order = torch.cat([first, order[others]])
    drawn = order[planned.draw()]
    cumulants = None if known is None else partial(foreseen_error, known[:, order], planned.stratum, planned.sizes)
    return Sample(drawn // batch, planned.stratum, planned.sizes, drawn % batch, cumulants)


def _outliers(known: Tensor, most: int) -> Tensor | None:
    """Return the rows furthest above the mean of any head, in increasing order; None if no row is an outlier."""
    usual = known.mean(1, keepdim=True) * OUTLIER_RATIO
    above = (known / torch.where(usual > 0, usual, torch.inf)).nan_to_num(0.0)
    if not most or not above.numel() or not bool((above >= 1).any()):
        return None
    return above.amax(0).topk(min(most, above.shape[1])).indices.sort().values


def foreseen_variance(call: Call) -> Tensor:
    """Return qᵀ Cov(k) q + (q·k̄ − μ)², (batch, heads, q_len): the predicted mean square deviation of each row.

    Cov(k) comes from evenly spaced keys, without scale, mask and soft-cap. Only ratios between rows are meaningful.
    """
    some = call.key[..., :: max(1, call.key.shape[-2] // FORESEEN_KEYS), :]
    query, key = (tensor.to(wide_dtype(tensor)) for tensor in (call.query, some))
    found = _squares(query, key, call.group)
    if is_surely_finite(found):
        return found
    return _squares(query / query.abs().amax(), key / key.abs().amax(), call.group)


def _squares(query: Tensor, key: Tensor, group: int) -> Tensor:
    usual = key.mean(-2, keepdim=True)
    apart = key - usual
    # Append the mean key to the covariance, so that one product computes both.
    both = torch.cat([apart.mT @ apart / max(key.shape[-2], 1), usual.mT], -1)
    product = query @ (both if group == 1 else both.repeat_interleave(group, dim=1))
    means = product[..., -1] - product[..., -1].mean((0, 2), keepdim=True)
    return product[..., :-1].mul_(query).sum(-1).addcmul_(means, means)  # in place: page faults cost more than products
