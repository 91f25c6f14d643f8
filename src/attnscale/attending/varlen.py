"""Ragged batches on a GPU: torch's flash attention over concatenated sequences."""

import torch
from torch import Tensor

from attnscale.attending.call import padded
from attnscale.attending.ragged import Layout, Ragged, as_one_row, as_tokens
from attnscale.numerics import HALF_DTYPES
from attnscale.torch_internals import constant_in_graphs, unseen

ALIGNMENT = 8  # head dimensions must be multiples of this
WIDEST_HEAD = 256  # largest head dimension that the kernels support


def serves(ragged: Ragged) -> bool:
    """Return True if one kernel runs all sequences: on CUDA, in half precision, without soft-cap or sinks."""
    row = ragged.row
    widest = max(row.query.shape[-1], row.value.shape[-1])
    return (
        row.query.is_cuda
        and row.query.dtype in HALF_DTYPES
        and row.softcap is None
        and row.sinks is None
        and row.dropout_p == 0.0
        and widest <= WIDEST_HEAD
        and row.query.numel() > 0
        and row.key.numel() > 0
        and _may_flash()
        and _window(ragged) is not None
    )


@constant_in_graphs
def _may_flash() -> bool:
    return bool(torch.backends.cuda.flash_sdp_enabled())


def attend(ragged: Ragged) -> Tensor:
    """Return softmax(scale · QKᵀ) V of every sequence, (1, heads, total, value_dim)."""
    from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler

    row = ragged.row
    width = -(-max(row.query.shape[-1], row.value.shape[-1]) // ALIGNMENT) * ALIGNMENT
    key, value = row.key, row.value
    if row.grouped:
        key, value = (tensor.repeat_interleave(row.group, dim=1) for tensor in (key, value))
    query, key, value = (as_tokens(padded(tensor, width)) for tensor in (row.query, key, value))
    window = _window(ragged)
    assert window is not None
    (starts_q, longest_q), (starts_k, longest_k) = _starts(ragged.rows, query), _starts(ragged.keys, key)
    output = varlen_attn(
        *(query, key, value, starts_q, starts_k, longest_q, longest_k), scale=row.scale, window_size=window
    )
    assert isinstance(output, Tensor)  # a tuple only if the lse is requested
    return as_one_row(output)[..., : row.value.shape[-1]]


def _starts(layout: Layout, tokens: Tensor) -> tuple[Tensor, int]:
    # In a graph the lengths are unknown: use the number of tokens as the upper bound of the longest sequence.
    is_known = layout.known_longest is not None or not unseen(layout.offsets)
    return layout.offsets.to(torch.int32), layout.longest if is_known else tokens.shape[0]


def _window(ragged: Ragged) -> tuple[int, int] | None:
    """Return the window (left, right) of the kernel, aligned to the last key; None if the kernel cannot express it."""
    seen = ragged.row.visibility
    if not seen.is_full and not seen.from_the_end and not ragged.rows.equals(ragged.keys):
        return None
    left, right = (0 if seen.first is None else -seen.first), (0 if seen.last is None else seen.last)
    if left < 0 or right < 0 or seen.mask is not None or seen.documents is not None:
        return None  # the kernel requires a window that includes the row's own position
    return -1 if seen.first is None else left, -1 if seen.last is None else right
