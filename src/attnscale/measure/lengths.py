"""How long vectors are, a head at a time: queries, keys, or the gradients that reach them.

On a GPU a kernel reads them once, at the memory's speed.
"""

import torch
from torch import Tensor

from attnscale.measure.cuda.taking import kernels_take_vectors
from attnscale.measure.cuda.ways import layout_of
from attnscale.numerics import lengths, wide_dtype


def head_lengths(vectors: Tensor) -> Tensor:
    """√Σx² of each head of (batch, heads, length, features): the length of all its vectors together.

    >>> head_lengths(torch.ones(2, 3, 8, 4)).tolist()
    [8.0, 8.0, 8.0]
    """
    if kernels_take_vectors(vectors):
        from attnscale.measure.cuda import triton

        return triton.head_lengths(vectors.unsqueeze(2), kind=("lengths", layout_of(vectors)))
    dtype = wide_dtype(vectors)
    if vectors.is_cuda:  # which adds up in pairs; a CPU, where features are not in a row, one by one
        return torch.linalg.vector_norm(vectors, dim=(0, 2, 3), dtype=dtype)  # type: ignore[no-any-return]
    each = torch.linalg.vector_norm(vectors, dim=-1, dtype=dtype)
    return torch.linalg.vector_norm(each, dim=(0, 2), dtype=torch.float64)  # type: ignore[no-any-return]


def lengths_of_sums(copies: Tensor) -> Tensor:
    """The same of vectors that are the sums of copies, (batch, heads, copies, length, features).

    >>> lengths_of_sums(torch.ones(2, 3, 5, 8, 4)).tolist()
    [40.0, 40.0, 40.0]
    """
    if kernels_take_vectors(copies):
        from attnscale.measure.cuda import triton

        return triton.head_lengths(copies, kind=("lengths of sums", layout_of(copies)))
    return head_lengths(copies.sum(2, dtype=wide_dtype(copies)))


def mean_lengths(vectors: Tensor, left_out: Tensor | None = None) -> Tensor:
    """Root mean square of the lengths of (batch, heads, positions, features), a value a head.

    `left_out`, (batch or 1, positions), says which of them do not count; where none would count, all do: the turn of a
    ring in which no key is seen.

    >>> mean_lengths(torch.tensor([[[[3.0, 4.0], [1.0, 0.0]]]]), torch.tensor([[False, True]])).tolist()
    [5.0]
    """
    if kernels_take_vectors(vectors):
        from attnscale.measure.cuda import triton

        layouts = layout_of(vectors), None if left_out is None else layout_of(left_out)
        return triton.mean_lengths(vectors, left_out, kind=("mean lengths", layouts))
    if left_out is None and vectors.device.type == "cpu" and vectors.dtype != torch.float64:  # which squares may pass
        squares = vectors.double().square_().sum((0, 2, 3))
        return squares.div_(vectors.shape[0] * vectors.shape[2]).sqrt_()
    squares = lengths(vectors).double().square()
    if left_out is None:
        return squares.mean((0, 2)).sqrt()
    counted = (~(left_out & ~left_out.all())).unsqueeze(1).expand_as(squares)
    return (torch.where(counted, squares, 0.0).sum((0, 2)) / counted.sum((0, 2))).sqrt()


def longest(vectors: Tensor) -> Tensor:
    """The length of the longest vector of each batch entry and head; NaN where one has it.

    >>> longest(torch.tensor([[[[3.0, 4.0], [1.0, 0.0]]]])).tolist()
    [[5.0]]
    """
    if kernels_take_vectors(vectors):
        from attnscale.measure.cuda import triton

        return triton.longest_squared(vectors, kind=("longest", layout_of(vectors))).sqrt_()
    return lengths(vectors).amax(-1)
