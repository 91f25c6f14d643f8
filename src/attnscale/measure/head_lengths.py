"""The length of all vectors of a head together: of queries, keys, or the gradients that reach them."""

import torch
from torch import Tensor

from attnscale.measure.cuda.attention import kernels_take_vectors
from attnscale.measure.cuda.watched import looked_on
from attnscale.measure.cuda.ways import layout_of
from attnscale.numerics import wide_dtype


def head_lengths(vectors: Tensor) -> Tensor:
    """√Σx² of each head of (batch, heads, length, features); on a GPU by one kernel, at the memory's speed.

    >>> head_lengths(torch.ones(2, 3, 8, 4)).tolist()
    [8.0, 8.0, 8.0]
    """
    if kernels_take_vectors(vectors) and not looked_on(vectors):
        from attnscale.measure.cuda import triton

        return triton.head_lengths(vectors, kind=("lengths", layout_of(vectors)))
    dtype = wide_dtype(vectors)
    if vectors.is_cuda:  # which adds up in pairs; a CPU, where features are not in a row, one by one
        return torch.linalg.vector_norm(vectors, dim=(0, 2, 3), dtype=dtype)  # type: ignore[no-any-return]
    each = torch.linalg.vector_norm(vectors, dim=-1, dtype=dtype)
    return torch.linalg.vector_norm(each, dim=(0, 2), dtype=torch.float64)  # type: ignore[no-any-return]
