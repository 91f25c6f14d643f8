"""Which rows to look at, and what having looked at those alone is worth.

Rows are drawn without replacement in strata of neighbouring positions, from all batch entries; what is foreseen to
stand out is taken for certain. Kernels of a GPU take as many of each entry, drawn apart, and attention written out the
same of every entry: each then stands for that row of the whole batch (a cluster). The variance of an estimated total
is the textbook one for such a design: Σ_h M_h² (1 − m_h/M_h) S_h / m_h, S_h being the sample covariance in stratum h.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscale.measure.ahead import next_draw
from attnscale.measure.uncertainty import Uncertainty

ROWS_A_STRATUM = 3  # neighbouring positions are alike; three of each tell how much they differ, and how skewed they are
LEAST_POSITIONS = 2  # one alone tells nothing about the spread between rows
CERTAIN_SHARE = 4  # where rows see unlike numbers of keys, one row in four goes to the first positions, all of them
STANDING_OUT_SHARE = 8  # and one in eight to rows foreseen to stand out, if any is
STANDS_OUT = 3.0  # times the usual variance of a row's scores: what a sample without such a row would not tell
DRAW = random.Random(0)  # of its own: measuring a model must not change the random numbers it trains with
SOURCE = np.random.default_rng(0)  # likewise, of many draws at once
SEED: ContextVar[int | None] = ContextVar("seed", default=None)


@contextmanager
def same_rows(seed: int) -> Iterator[None]:
    """Draw the same positions for all queries of one length, whatever keys they see: ranks then look at the same rows.

    >>> draws = []
    >>> for uneven in (False, True):
    ...     with same_rows(7):
    ...         draws.append(sample_positions(5, 100, 1, uneven).positions.tolist())
    >>> draws[0] == draws[1]
    True
    """
    token = SEED.set(seed)
    try:
        yield
    finally:
        SEED.reset(token)


def rows_are_shared() -> bool:
    """Whether calls elsewhere look at the same rows, over other keys: what is put together must not depend on a cut."""
    return SEED.get() is not None


@dataclass(frozen=True)
class Foreseen:
    """What was known of all rows before some were looked at."""

    design: "Design"
    all_rows: Tensor  # (heads, rows)
    drawn: Tensor  # which of them were looked at
    by_stratum: Tensor | None = None  # the order in which they are those of the design; None: as they are

    @property
    def rows(self) -> Tensor:
        """(heads, rows), of those looked at."""
        return self.all_rows.index_select(1, self.drawn)

    @property
    def cumulants(self) -> Tensor:
        """(3, heads) of the error in the estimated total: second, third, Σ (a stratum's second)²."""
        rows = self.all_rows if self.by_stratum is None else self.all_rows.index_select(1, self.by_stratum)
        return self.design.cumulants(rows.double())


@dataclass(frozen=True)
class Sample:
    """Sampled positions by stratum, and how many rows each stratum has: of one entry, or of all where entries say."""

    positions: Tensor  # (rows,), or of each batch entry others, (batch, rows)
    stratum: Tensor  # (rows,)
    sizes: Tensor  # (strata,)
    entries: Tensor | None = None  # (rows,) the batch entry of each; None: so many of every entry
    foreseen: "Foreseen | None" = None

    @property
    def length(self) -> int:
        """How many positions there are in all."""
        return int(self.sizes.sum())

    @property
    def weights(self) -> Tensor:
        """How many positions each sampled one stands for."""
        taken = torch.bincount(self.stratum, minlength=len(self.sizes)).clamp(min=1)
        return (self.sizes / taken)[self.stratum]

    def by_stratum(self, quantity: Tensor) -> Tensor:
        """What uncertainty_of_totals() takes of (batch, heads, rows): rows that stand for the whole batch in one."""
        return quantity.transpose(0, 1).flatten(1) if self.positions.dim() == 2 else quantity.sum(0)

    def of_all_entries(self) -> "Sample":
        """The same with the rows of all batch entries in one, each entry in strata of its own."""
        if self.positions.dim() == 1:
            return self
        batch, strata = self.positions.shape[0], len(self.sizes)
        stratum = self.stratum + strata * torch.arange(batch, device=self.stratum.device).unsqueeze(-1)
        return Sample(self.positions.flatten(), stratum.flatten(), self.sizes.repeat(batch))

    def uncertainty_of_totals(self, features: Tensor, least: Tensor) -> Uncertainty:
        """Of the estimated totals of features (heads, rows, features).

        `least`, of the same shape: a variance of each row that is known besides; the larger of the two counts.
        """
        stratum, sizes = self.stratum.to(features.device), self.sizes.to(features)
        strata = len(self.sizes)
        taken = torch.bincount(stratum, minlength=strata).to(features)
        heads, _, width = features.shape

        member = (stratum == torch.arange(strata, device=stratum.device).unsqueeze(-1)).to(features)

        def within(values: Tensor) -> Tensor:
            means = member @ values / taken[:, None].clamp(min=1)  # in one order, on a GPU too
            return values - means[:, stratum]

        residual = within(features)
        # each row's share: M² (1 − m/M) / (m (m − 1)), so that one product over all rows is the sum over strata
        share = sizes * (sizes - taken) / (taken * (taken - 1)).clamp(min=1)
        slopes, known = features.new_zeros(heads, width), features.new_zeros(3, heads)
        if self.foreseen is not None:
            foreseen, known = (
                within(self.foreseen.rows.to(features).unsqueeze(-1)),
                self.foreseen.cumulants.to(features),
            )
            along = (foreseen * share[stratum, None]).mT
            slopes = (along @ residual / (along @ foreseen).clamp(min=torch.finfo(features.dtype).tiny)).squeeze(1)
            residual = residual - foreseen * slopes.unsqueeze(1)
        covariance = (residual * share[stratum, None]).mT @ residual
        # and for what goes with a total known of all rows, its own variance and skewness, which no sample can miss
        covariance = covariance + known[0, :, None, None] * slopes.unsqueeze(-1) * slopes.unsqueeze(-2)
        alone = sizes * (sizes - taken) / taken.square().clamp(min=1)
        variance = covariance.diagonal(dim1=1, dim2=2)
        variance.copy_(torch.maximum(variance, (least * alone[stratum, None]).sum(1)))
        # likewise M³ (1 − m/M) (1 − 2m/M) / (m (m − 1) (m − 2)), nothing where half of a stratum or more was taken
        cubed = sizes * (sizes - taken) * (sizes - 2 * taken).clamp(min=0)
        cubed = cubed / (taken * (taken - 1) * (taken - 2)).clamp(min=1)
        squares = (residual.unsqueeze(-1) * residual.unsqueeze(-2)).flatten(2)
        third = (squares * cubed[stratum, None]).mT @ residual
        drawn = (sizes > taken).to(features) * taken
        freedom = ((sizes > taken) * (taken - 1)).sum()
        step = (sizes * (sizes - taken) / taken.clamp(min=1)).sum() / drawn.sum().clamp(min=1)
        third = third.unflatten(1, (width, width))
        third = third + torch.einsum("h,hi,hj,hk->hijk", known[1], slopes, slopes, slopes)
        return Uncertainty(covariance, third, freedom.expand(heads), step.expand(heads), known.mT)


@dataclass(frozen=True)
class Design:
    """Which positions are taken for certain, and the edges of the strata that the others are drawn from."""

    certain: int
    edges: tuple[int, ...]
    taken: tuple[int, ...]  # of each stratum

    @cached_property
    def stratum(self) -> Tensor:
        """The stratum of each sampled position; those taken for certain are one of their own.

        On a CPU, whatever torch's default device is.
        """
        counts = [self.certain, *self.taken]
        return torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int64), counts))

    @cached_property
    def sizes(self) -> Tensor:
        """How many positions each stratum has."""
        sizes = [self.certain, *(stop - start for start, stop in pairwise(self.edges))]
        return torch.from_numpy(np.array(sizes, dtype=np.int64))

    def cumulants(self, values: Tensor) -> Tensor:
        """Of the error in the estimated total of values known of all rows, (heads, rows) by stratum."""
        sizes, taken = self.sizes.to(values), torch.bincount(self.stratum, minlength=len(self.sizes)).to(values)
        of = torch.repeat_interleave(torch.arange(len(sizes)), self.sizes)
        means = values.new_zeros(len(values), len(sizes)).index_add_(1, of, values) / sizes.clamp(min=1)
        apart = values - means[:, of]
        left = (sizes - taken) / taken.clamp(min=1)
        second = sizes / (sizes - 1).clamp(min=1) * left
        third = sizes * left * (sizes - 2 * taken) / ((sizes - 1) * (sizes - 2)).clamp(min=1) * sizes
        third = third / taken.clamp(min=1)
        each = values.new_zeros(len(values), len(sizes)).index_add_(1, of, apart.square() * second[of])
        return torch.stack([each.sum(1), (apart.pow(3) * third[of]).sum(1), each.square().sum(1)])

    def draw(self) -> list[int]:
        """Positions in increasing order, drawn anew."""
        return self.draw_each(1)[0]

    def draw_each(self, batch: int) -> list[list[int]]:
        """The same for every batch entry, of the other ones apart."""
        seed = SEED.get()
        source = DRAW if seed is None else random.Random(seed)
        return [self._drawn(source) for _ in range(batch)]

    def _drawn(self, source: random.Random) -> list[int]:
        positions = list(range(self.certain))
        for (start, stop), taken in zip(pairwise(self.edges), self.taken, strict=True):
            positions += sorted(_chosen(source, start, stop, taken))
        return positions

    def draws(self, count: int) -> NDArray[np.int32]:
        """So many draws at once, (count, rows), each in one piece: Floyd's algorithm on all strata of all draws."""
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

    def sample(self, positions: Tensor) -> Sample:
        """A draw with what it is worth."""
        return Sample(positions, self.stratum, self.sizes)


def _chosen(source: random.Random, start: int, stop: int, count: int) -> set[int]:
    """So many of the numbers from `start` to `stop`, by Floyd's algorithm: random.sample() takes thrice as long."""
    chosen: set[int] = set()
    for last in range(stop - count, stop):
        picked = start + int(source.random() * (last + 1 - start))
        chosen.add(last if picked in chosen else picked)
    return chosen


def design(rows: int, length: int, batch: int, uneven: bool) -> Design | None:
    """About `rows` rows a head, spread over position and batch; None where that is every row.

    `uneven`: rows see unlike numbers of keys, mostly few at first; the first are then all taken, and the strata widen
    towards the end. Rows that see part of their keys here count as such.
    """
    return _design(rows, length, batch, uneven or SEED.get() is not None, 0)


@lru_cache(maxsize=64)
def _design(rows: int, length: int, batch: int, uneven: bool, standing_out: int) -> Design | None:
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
    """About `rows` rows a head, drawn anew; None where that is every row."""
    planned = design(rows, length, batch, uneven)
    return None if planned is None else planned.sample(torch.tensor(planned.draw()))


def sample_rows(rows: int, batch: int, length: int, uneven: bool, foreseen: Tensor | None = None) -> Sample | None:
    """About `rows` rows a head of all batch entries, drawn anew; None where that is every row.

    `foreseen`, (batch, heads, length): the variance that the scores of each row should have.
    """
    seeded = SEED.get() is not None
    known = None if foreseen is None or seeded else foreseen.permute(1, 2, 0).flatten(1)
    first = None if known is None else _standing_out(known.numpy(), rows // STANDING_OUT_SHARE)
    planned = _design(rows, batch * length, 1, uneven or seeded, 0 if first is None else len(first))
    if planned is None:
        return None
    drawn = torch.tensor(planned.draw()) if seeded else next_draw(planned)
    order = None
    if first is not None:
        others = np.ones(batch * length, dtype=bool)
        others[first] = False
        order = torch.from_numpy(np.concatenate([first, others.nonzero()[0]]))
        drawn = order.index_select(0, drawn)
    positions, entries = (drawn, torch.zeros_like(drawn)) if batch == 1 else (drawn // batch, drawn % batch)
    told = None if known is None else Foreseen(planned, known, drawn, order)
    return Sample(positions, planned.stratum, planned.sizes, entries, told)


def _standing_out(known: NDArray[np.floating], most: int) -> NDArray[np.int64] | None:
    """The rows that are furthest above the usual of any head, in their order; None where no row is far above.

    A few thousand numbers, of which torch's operators take longer to call than to run.
    """
    if not most or not known.size:
        return None
    far = np.add.reduce(known, 1, keepdims=True) * (STANDS_OUT / known.shape[1])
    if not (np.maximum.reduce(known, 1, keepdims=True) >= far).any():
        return None
    far[~(far > 0)] = np.inf
    with np.errstate(invalid="ignore", over="ignore"):
        above = np.fmax.reduce(known / far, 0)  # NaN is no number of any row
    above[np.isnan(above)] = 0.0
    if above.max() < 1.0:
        return None
    most = min(most, len(above))
    return np.sort(np.argpartition(above, -most)[-most:])
