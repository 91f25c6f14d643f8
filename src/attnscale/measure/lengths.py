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

        return triton.head_lengths(vectors, kind=("lengths", layout_of(vectors)))
    dtype = wide_dtype(vectors)
    if vectors.is_cuda:  # which adds up in pairs; a CPU, where features are not in a row, one by one
        return torch.linalg.vector_norm(vectors, dim=(0, 2, 3), dtype=dtype)  # type: ignore[no-any-return]
    each = torch.linalg.vector_norm(vectors, dim=-1, dtype=dtype)
    return torch.linalg.vector_norm(each, dim=(0, 2), dtype=torch.float64)  # type: ignore[no-any-return]


def longest(vectors: Tensor) -> Tensor:
    """The length of the longest vector of each batch entry and head; NaN where one has it.

    >>> longest(torch.tensor([[[[3.0, 4.0], [1.0, 0.0]]]])).tolist()
    [[5.0]]
    """
    if kernels_take_vectors(vectors):
        from attnscale.measure.cuda import triton

        return triton.longest_squared(vectors, kind=("longest", layout_of(vectors))).sqrt_()
    return lengths(vectors).amax(-1)
