"""Ragged batches on a GPU: torch's flash attention over sequences laid end to end."""

import torch
from torch import Tensor

from attnscale.attending.call import padded
from attnscale.attending.ragged import Layout, Ragged, as_one_row, as_tokens
from attnscale.numerics import HALF_DTYPES
from attnscale.torch_internals import constant_in_graphs, unseen

ALIGNMENT = 8  # of the head dimensions that the kernels take,
WIDEST_HEAD = 256  # and the widest of them


def serves(ragged: Ragged) -> bool:
    """Return True if a kernel takes all sequences at once: on CUDA, in half precision, without soft-cap or sinks."""
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
    assert isinstance(output, Tensor)  # a tuple only where lse was asked for
    return as_one_row(output)[..., : row.value.shape[-1]]


def _starts(layout: Layout, tokens: Tensor) -> tuple[Tensor, int]:
    # in a graph no more is known than that no sequence is longer than all tokens
    is_known = layout.known_longest is not None or not unseen(layout.offsets)
    return layout.offsets.to(torch.int32), layout.longest if is_known else tokens.shape[0]


def _window(ragged: Ragged) -> tuple[int, int] | None:
    """Return keys to the left and right of a row, counted from the end as those kernels do; None where they cannot."""
    seen = ragged.row.visibility
    if not seen.is_full and not seen.from_the_end and not ragged.rows.equals(ragged.keys):
        return None
    left, right = (0 if seen.first is None else -seen.first), (0 if seen.last is None else seen.last)
    if left < 0 or right < 0 or seen.mask is not None or seen.documents is not None:
        return None  # a window that does not hold the row's own position
    return -1 if seen.first is None else left, -1 if seen.last is None else right
