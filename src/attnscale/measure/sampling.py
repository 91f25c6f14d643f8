"""Sampled rows, drawn without replacement in strata of neighbouring positions.

Rows whose scores should have an unusual variance are taken for certain. A CPU draws from all batch entries together.
Kernels of a GPU take as many rows of each entry. Attention written out takes the same rows of every entry: each then
stands for that row of the whole batch (a cluster).
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
from attnscale.numerics import is_surely_finite, wide_dtype

ROWS_A_STRATUM = 3  # neighbouring positions are alike; three of each tell how much they differ
LEAST_POSITIONS = 2  # one alone tells nothing about the spread between rows
CERTAIN_SHARE = 4  # where rows see unlike numbers of keys, one row in four goes to the first positions, all of them
STANDING_OUT_SHARE = 8  # and one in eight to rows foreseen to stand out, if any is
STANDS_OUT = 3.0  # times the usual variance of a row's scores: what a sample without such a row would not tell
FORESEEN_KEYS = 256  # whose covariance is taken: enough to tell rows apart, and cheap beside looking at some of them
SOURCE = np.random.default_rng(0)  # of its own: measuring a model must not change the random numbers it trains with


@dataclass(frozen=True)
class Sample:
    """Sampled positions by stratum, and how many rows each stratum has: of one entry, or of all where entries say."""

    positions: Tensor  # (rows,), or of each batch entry others, (batch, rows)
    stratum: Tensor  # (rows,)
    sizes: Tensor  # (strata,)
    entries: Tensor | None = None  # (rows,) the batch entry of each; None: so many of every entry
    foreseen: Callable[[], Tensor] | None = None  # cumulants of what was foreseen of all rows

    @property
    def length(self) -> int:
        """Number of positions in all."""
        return int(self.sizes.sum())

    @property
    def weights(self) -> Tensor:
        """Number of positions that each sampled one stands for."""
        taken = torch.bincount(self.stratum, minlength=len(self.sizes)).clamp(min=1)
        return (self.sizes / taken)[self.stratum]

    def by_stratum(self, quantity: Tensor) -> Tensor:
        """Return (batch, heads, rows) as (heads, rows) of of_all_entries(), or summed over the batch."""
        return quantity.transpose(0, 1).flatten(1) if self.positions.dim() == 2 else quantity.sum(0)

    def of_all_entries(self) -> "Sample":
        """Return the same with the rows of all batch entries in one, each entry in strata of its own."""
        if self.positions.dim() == 1:
            return self
        batch, strata = self.positions.shape[0], len(self.sizes)
        stratum = self.stratum + strata * torch.arange(batch, device=self.stratum.device).unsqueeze(-1)
        return Sample(self.positions.flatten(), stratum.flatten(), self.sizes.repeat(batch))


@dataclass(frozen=True)
class Design:
    """Number of positions taken for certain, and the edges of the strata that the others are drawn from."""

    certain: int
    edges: tuple[int, ...]
    taken: tuple[int, ...]  # of each stratum

    @cached_property
    def stratum(self) -> Tensor:
        """Stratum of each sampled position, on the CPU; those taken for certain are one of their own."""
        counts = [self.certain, *self.taken]
        return torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int64), counts))

    @cached_property
    def sizes(self) -> Tensor:
        """Number of positions of each stratum."""
        sizes = [self.certain, *(stop - start for start, stop in pairwise(self.edges))]
        return torch.from_numpy(np.array(sizes, dtype=np.int64))

    def draws(self, count: int) -> NDArray[np.int32]:
        """Return so many draws, (count, rows), each in increasing order: Floyd's algorithm on all strata at once."""
        edges, taken = np.array(self.edges), np.array(self.taken)
        widest = int(taken.max(initial=0))
        chosen = np.full((count, len(taken), widest), -1)
        for step in range(widest):
            # the step-th of a stratum comes from so many of its first, and one more
            size = np.diff(edges) - taken + step
            picked = SOURCE.integers(0, np.maximum(size, 0) + 1, (count, len(taken)))
            met = (chosen[..., :step] == picked[..., None]).any(-1)
            chosen[..., step] = np.where(step < taken, np.where(met, size, picked), -1)
        positions = np.sort(np.where(chosen < 0, -1, chosen + edges[:-1, None]), axis=-1).reshape(count, -1)
        kept = (np.arange(widest) >= widest - taken[:, None]).reshape(-1)
        certain = np.broadcast_to(np.arange(self.certain), (count, self.certain))
        return np.ascontiguousarray(np.concatenate([certain, positions[:, kept]], axis=1), np.int32)

    def draw(self) -> Tensor:
        """Return positions in increasing order, drawn anew."""
        with torch.inference_mode(False):  # they may be used outside it
            return torch.from_numpy(self.draws(1)[0].astype(np.int64))

    def sample(self, positions: Tensor) -> Sample:
        """Return a draw with its strata."""
        return Sample(positions, self.stratum, self.sizes)


@lru_cache(maxsize=64)
def design(rows: int, length: int, batch: int, uneven: bool, standing_out: int = 0) -> Design | None:
    """Return a design for about `rows` rows a head, spread over position and batch; None where that is every row.

    `uneven`: rows see unlike numbers of keys, mostly few at first; the first are then all taken, and the strata widen
    towards the end. So many rows that stand out are taken for certain besides.
    """
    wanted = max(LEAST_POSITIONS, -(-rows // max(batch, 1)))
    if wanted >= length:
        return None
    certain = (wanted // CERTAIN_SHARE if uneven else 0) + standing_out
    strata = max(1, (wanted - certain) // ROWS_A_STRATUM)
    given = [step * (wanted - certain) // strata for step in range(strata + 1)]
    # every stratum has the positions it gives, and its part of those left over
    left_over = [int((length - wanted) * (step / strata) ** (2 if uneven else 1)) for step in range(strata + 1)]
    edges = (certain + a + b for a, b in zip(given, left_over, strict=True))
    return Design(certain, tuple(edges), tuple(after - before for before, after in pairwise(given)))


def sample_positions(rows: int, length: int, batch: int, uneven: bool) -> Sample | None:
    """Return about `rows` rows a head, the same of every batch entry, drawn anew; None where that is every row."""
    planned = design(rows, length, batch, uneven)
    return None if planned is None else planned.sample(planned.draw())


def sample_rows(rows: int, batch: int, length: int, uneven: bool, foreseen: Tensor | None = None) -> Sample | None:
    """Return about `rows` rows a head of all batch entries, drawn anew; None where that is every row.

    `foreseen`, (batch, heads, length): the variance that the scores of each row should have.
    """
    known = None if foreseen is None else foreseen.permute(1, 2, 0).flatten(1)
    first = None if known is None else _standing_out(known, rows // STANDING_OUT_SHARE)
    certain = 0 if first is None else len(first)
    planned = design(rows, batch * length, 1, uneven, certain)
    if planned is None:
        return None
    order = torch.arange(batch * length)
    if first is not None:
        others = torch.ones(batch * length, dtype=torch.bool).index_fill_(0, first, False)
        order = torch.cat([first, order[others]])
    drawn = order[planned.draw()]
    cumulants = None if known is None else partial(_cumulants, planned, known[:, order])
    return Sample(drawn // batch, planned.stratum, planned.sizes, drawn % batch, cumulants)


def _standing_out(known: Tensor, most: int) -> Tensor | None:
    """Return the rows that are furthest above the usual of any head, in their order; None where no row is far above."""
    usual = known.mean(1, keepdim=True) * STANDS_OUT
    above = (known / torch.where(usual > 0, usual, torch.inf)).nan_to_num(0.0)
    if not most or not above.numel() or not bool((above >= 1).any()):
        return None
    return above.amax(0).topk(min(most, above.shape[1])).indices.sort().values


def foreseen_variance(call: Call) -> Tensor:
    """Return qᵀ Cov(k) q + (q·k̄ − μ)², (batch, heads, q_len): how far the scores of each row lie from the head's mean.

    Cov(k) is of keys spread evenly, before masks and caps, and the unit is of its own: it tells rows apart.
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
    # the mean key beside the covariance: one product for both
    both = torch.cat([apart.mT @ apart / max(key.shape[-2], 1), usual.mT], -1)
    product = query @ (both if group == 1 else both.repeat_interleave(group, dim=1))
    means = product[..., -1] - product[..., -1].mean((0, 2), keepdim=True)
    return product[..., :-1].mul_(query).sum(-1).addcmul_(means, means)  # in place: new pages take longer than products


def _cumulants(planned: Design, values: Tensor) -> Tensor:
    """Return (heads, 3) of the error in the estimated total of values known of all rows, (heads, rows) by stratum.

    They are its second and third cumulant, and the sum of the squares of each stratum's second.
    """
    values = values.double()
    sizes, taken = planned.sizes.to(values), torch.bincount(planned.stratum, minlength=len(planned.sizes)).to(values)
    of = torch.repeat_interleave(torch.arange(len(sizes)), planned.sizes)
    means = values.new_zeros(len(values), len(sizes)).index_add_(1, of, values) / sizes.clamp(min=1)
    apart = values - means[:, of]
    left = (sizes - taken) / taken.clamp(min=1)
    second = sizes / (sizes - 1).clamp(min=1) * left
    third = sizes * left * (sizes - 2 * taken) / ((sizes - 1) * (sizes - 2)).clamp(min=1) * sizes
    third = third / taken.clamp(min=1)
    each = values.new_zeros(len(values), len(sizes)).index_add_(1, of, apart.square() * second[of])
    return torch.stack([each.sum(1), (apart.pow(3) * third[of]).sum(1), each.square().sum(1)], dim=-1)
