"""Ragged batches on a GPU, without padding: torch's kernels for sequences laid end to end."""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnscale.attending.call import padded
from attnscale.attending.ragged import Ragged
from attnscale.attending.sequences import Layout, as_one_row, as_tokens, jagged
from attnscale.numerics import HALF_DTYPES, KERNEL_DTYPES
from attnscale.torch_internals import constant_in_graphs, unseen

ALIGNMENT = 8  # of the head dimensions that the kernels take,
WIDEST_HEAD = 256  # and the widest of them


def serves(ragged: Ragged) -> bool:
    """Whether a kernel takes all sequences at once: on CUDA, without a soft-cap, windows in half precision alone."""
    row = ragged.row
    widest = max(row.query.shape[-1], row.value.shape[-1])
    fits = (
        row.query.is_cuda
        and row.softcap is None
        and row.sinks is None
        and row.query.dtype in KERNEL_DTYPES
        and widest <= WIDEST_HEAD
    )
    if not fits or not row.query.numel() or not row.key.numel():
        return False
    _, efficient = _enabled()
    return _takes_window(ragged) or (_may_be_nested(ragged) and (efficient or _may_flash(ragged)))


def _takes_window(ragged: Ragged) -> bool:
    return _may_flash(ragged) and ragged.row.dropout_p == 0.0 and _window(ragged) is not None


def _may_be_nested(ragged: Ragged) -> bool:
    return ragged.row.visibility.is_full and not unseen(ragged.rows.offsets)


def _may_flash(ragged: Ragged) -> bool:
    flash, _ = _enabled()
    return flash and ragged.row.query.dtype in HALF_DTYPES


@constant_in_graphs
def _enabled() -> tuple[bool, bool]:
    """Whether flash and memory-efficient kernels may be used."""
    return torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()


def attend(ragged: Ragged) -> Tensor:
    """softmax(scale · QKᵀ) V of every sequence, (1, heads, total, value_dim)."""
    row = ragged.row
    width = -(-max(row.query.shape[-1], row.value.shape[-1]) // ALIGNMENT) * ALIGNMENT
    key, value = row.key, row.value
    if row.grouped:
        key, value = (tensor.repeat_interleave(row.group, dim=1) for tensor in (key, value))
    tensors = (as_tokens(padded(tensor, width)) for tensor in (row.query, key, value))
    by_nested = _may_be_nested(ragged) and not _takes_window(ragged)
    output = (attend_nested if by_nested else _attend_window)(ragged, *tensors)
    return as_one_row(output)[..., : row.value.shape[-1]]


def attend_nested(ragged: Ragged, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """SDPA of jagged tensors, which has kernels for them; for causal ones the gradients of torch 2.11 are wrong."""
    rows = ragged.rows.offsets.long()
    keys = rows if ragged.rows.equals(ragged.keys) else ragged.keys.offsets.long()
    nested = [
        torch.nested.nested_tensor_from_jagged(tokens.contiguous(), offsets).transpose(1, 2)
        for tokens, offsets in ((query, rows), (key, keys), (value, keys))
    ]
    dropout_p, scale = ragged.row.dropout_p, ragged.row.scale
    output = F.scaled_dot_product_attention(nested[0], nested[1], nested[2], None, dropout_p, scale=scale)
    by_token: Tensor = jagged(output.transpose(1, 2)).values()
    return by_token


def _attend_window(ragged: Ragged, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler

    window = _window(ragged)
    assert window is not None
    (starts_q, longest_q), (starts_k, longest_k) = _starts(ragged.rows, query), _starts(ragged.keys, key)
    output = varlen_attn(
        *(query, key, value, starts_q, starts_k, longest_q, longest_k), scale=ragged.row.scale, window_size=window
    )
    assert isinstance(output, Tensor)  # a tuple only where lse was asked for
    return output


def _starts(layout: Layout, tokens: Tensor) -> tuple[Tensor, int]:
    """No sequence is longer than all tokens: in a graph that is all there is to know, unless it was said."""
    is_known = layout.known_longest is not None or not unseen(layout.offsets)
    return layout.offsets.to(torch.int32), layout.longest if is_known else tokens.shape[0]


def _window(ragged: Ragged) -> tuple[int, int] | None:
    """Keys to the left and right of a row, counted from the end, as those kernels do; None where they cannot."""
    seen = ragged.row.visibility
    if not seen.is_full and not seen.from_the_end and not ragged.rows.equals(ragged.keys):
        return None
    left, right = (0 if seen.first is None else -seen.first), (0 if seen.last is None else seen.last)
    if left < 0 or right < 0 or seen.mask is not None or seen.documents is not None:
        return None  # a window that does not hold the row's own position
    return -1 if seen.first is None else left, -1 if seen.last is None else right
