"""How long the queries and keys of a kernel were as they left their projections, a value a head."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from attnscale.measure.lengths import mean_lengths, mean_lengths_of_both
from attnscale.measure.sampling import rows_are_shared
from attnscale.numerics import constant_on
from attnscale.watching.call import Factors

NORMED_ROWS = 64

Positions = Tensor | None  # (batch or 1, positions): those that do not count


def projected_norm(tensor: Tensor, factor: Factors, left_out: Positions = None, every: bool = False) -> Tensor:
    """Of vectors as they left their projection; on their device, since to look at it would be to wait for a GPU.

    Over every position that is not left out, or over some that are spread evenly. `factor`: one a head, or of each
    batch entry others.
    """
    vectors, left_out = _measured(tensor, left_out, every)
    if factor.ndim == 2:  # a row that sees one key is multiplied by ln 1
        apart = torch.from_numpy(np.where(factor == 0, 1.0, np.abs(factor))).to(vectors)
        vectors, factor = vectors / apart[..., None, None], np.ones(1)
    return before(mean_lengths(vectors, left_out), factor)


def projected_norms(
    query: Tensor, key: Tensor, factors: tuple[Factors, Factors], left_out: tuple[Positions, Positions], every: bool
) -> Iterator[Tensor]:
    """The same of queries, and of the key that each of their heads has, by a factor a query head; in one go."""
    query, padding = _measured(query, left_out[0], every)
    key, hidden = _measured(key, left_out[1], every)
    return map(before, mean_lengths_of_both(query, key, (padding, hidden)), factors)


def before(norm: Tensor, factor: Factors) -> Tensor:
    """What it was before it was multiplied."""
    return norm if (factor == 1).all() else norm / constant_on(norm.device, np.abs(factor))


def some_of(vectors: Tensor) -> Tensor:
    """About so many of them as are measured, spread over their positions."""
    return vectors.detach()[:, :, :: _step(vectors)]


def _measured(vectors: Tensor, left_out: Positions, every: bool) -> tuple[Tensor, Positions]:
    step = 1 if every or rows_are_shared() else _step(vectors)
    return vectors.detach()[:, :, ::step], None if left_out is None else left_out[:, ::step]


def _step(vectors: Tensor) -> int:
    return max(1, vectors.shape[-2] // NORMED_ROWS)
