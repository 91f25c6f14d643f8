"""Norms of the queries, keys or gradients of each head, and upper bounds of scores from them."""

import numpy as np
import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cuda.launch import is_intercepted, kernels_take
from attnscale.numerics import lengths, wide_dtype
from attnscale.visibility import EVERYTHING

BOUND_SLACK = 1e-5  # larger than the rounding error of a float32 norm


def head_lengths(vectors: Tensor) -> Tensor:
    """Return √Σx² of each head of (batch, heads, length, features): the norm over all its vectors.

    >>> head_lengths(torch.ones(2, 3, 8, 4)).tolist()
    [8.0, 8.0, 8.0]
    """
    each = torch.linalg.vector_norm(vectors, dim=-1, dtype=wide_dtype(vectors))
    return torch.linalg.vector_norm(each, dim=(0, 2), dtype=torch.float64)  # type: ignore[no-any-return]


def mean_lengths(
    query: Tensor, key: Tensor, left_out: tuple[Tensor | None, Tensor | None] = (None, None)
) -> tuple[Tensor, Tensor]:
    """Return the root mean square norm of the queries, and of the keys, that each head uses.

    `left_out`, boolean (batch or 1, positions) for each of the two, excludes positions. If it would exclude all
    positions, it is ignored.

    >>> [found.tolist() for found in mean_lengths(torch.ones(1, 2, 9, 4), torch.ones(1, 1, 5, 1))]
    [[2.0, 2.0], [1.0, 1.0]]
    """
    sums = query.new_zeros(2, 3, query.shape[1], dtype=torch.float64)
    add_lengths_(sums, query, key, *(None if out is None else out & ~out.all() for out in left_out))
    queries, keys = (sums[:, 0] / sums[:, 1]).sqrt().unbind()
    return queries, keys


def add_lengths_(
    sums: Tensor, query: Tensor, key: Tensor, rows_left_out: Tensor | None = None, keys_left_out: Tensor | None = None
) -> None:
    """Add Σ‖x‖², the number of vectors and the largest ‖x‖² of queries and keys to `sums`, float64 (2, 3, heads).

    The sums of a key head are added for each query head that shares it. `rows_left_out` and `keys_left_out` are
    boolean, (batch or 1, length).

    >>> sums = torch.zeros(2, 3, 2, dtype=torch.float64)
    >>> add_lengths_(sums, torch.ones(1, 2, 9, 4), torch.ones(1, 1, 5, 1))
    >>> sums[:, :, 0].tolist()
    [[36.0, 9.0, 4.0], [5.0, 5.0, 1.0]]
    """
    call = Call(query, key, key, EVERYTHING, 0.0, 1.0, None)
    is_alike = query.shape[::3] == key.shape[::3]  # equal batch and head_dim
    if is_alike and kernels_take(call) and not is_intercepted(query, key):
        from attnscale.measure.cuda import lengths as kernel  # imported late: triton may not be installed

        kernel.add_lengths_(sums, query, key, rows_left_out, keys_left_out)
        return
    for side, vectors, left_out in ((0, query, rows_left_out), (1, key, keys_left_out)):
        squares = lengths(vectors).double().square_()  # (batch, heads, positions)
        counts = squares.new_tensor(squares.shape[0] * squares.shape[2])
        if left_out is not None:
            squares = squares.masked_fill_(left_out.unsqueeze(1), 0.0)
            counts = (~left_out).expand(len(squares), -1).sum()
        sums[side, 0] += _repeat_for_group(squares.sum((0, 2)), query)
        sums[side, 1] += counts
        if squares.numel():
            sums[side, 2] = torch.maximum(sums[side, 2], _repeat_for_group(squares.amax((0, 2)), query))


def mean_cosine(query: Tensor, key: Tensor, left_out: tuple[Tensor | None, Tensor | None] = (None, None)) -> Tensor:
    """Return the root mean square cosine between all queries and all keys of each head, weighted by their norms.

    The formula is √(Σ(q·k)² / Σ‖q‖²‖k‖²), at most one. `left_out` as in mean_lengths().

    >>> mean_cosine(torch.ones(1, 2, 3, 4), -torch.ones(1, 1, 5, 4)).tolist()
    [1.0, 1.0]
    """
    grams = []
    for vectors, out in zip((query, key), left_out, strict=True):
        wide = vectors.detach().to(wide_dtype(vectors))
        wide = wide if out is None else wide.masked_fill((out & ~out.all())[:, None, :, None], 0.0)
        grams.append((wide.mT @ wide).double())
    query_gram, key_gram = grams[0], grams[1].repeat_interleave(query.shape[1] // max(key.shape[1], 1), dim=1)
    squares = (query_gram * key_gram).sum((0, 2, 3))
    traces = [gram.diagonal(dim1=-2, dim2=-1).sum(-1) for gram in (query_gram, key_gram)]
    return (squares / (traces[0] * traces[1]).sum(0)).sqrt()


def _repeat_for_group(of_keys: Tensor, query: Tensor) -> Tensor:
    """Repeat a value per key head for each query head that shares it."""
    group = query.shape[1] // max(len(of_keys), 1)
    return of_keys if group == 1 else of_keys.repeat_interleave(group)


def max_bound(call: Call, lse: Tensor | None = None) -> Tensor:
    """Return an upper bound of each head's scores: |scale| · max‖q‖ · max‖k‖, plus the largest bias (Cauchy–Schwarz).

    If a kernel returned the lse of every row and no key is masked, the largest lse is a tighter bound.
    """
    if not call.query.numel() or not call.key.numel():
        return call.query.new_full(call.query.shape[1:2], -torch.inf)
    if lse is not None and call.visibility.is_plain:
        highest = lse.detach().numpy().max((0, 2))
        return torch.from_numpy(highest + (np.abs(highest) + 1.0) * BOUND_SLACK)
    queries, keys = lengths(call.query).amax(-1), lengths(call.key).amax(-1)
    keys = keys if call.group == 1 else keys.repeat_interleave(call.group, dim=1)
    bound = queries * keys * abs(call.scale)
    if call.softcap is not None:
        bound = call.softcap * torch.tanh(bound / call.softcap)
    if call.visibility.bias is not None:
        bound = bound + call.visibility.bias.amax((-2, -1))
    return (bound * (1 + BOUND_SLACK)).amax(0)
