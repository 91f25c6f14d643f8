"""Which kernel runs an attention: torch's fused ones wherever they serve, then FlexAttention, then blocks of rows."""

from dataclasses import replace

import torch
from torch import Tensor

from attnscale.attending import flex, row_blocks, sdpa, varlen
from attnscale.attending.call import Call
from attnscale.attending.ragged import Ragged
from attnscale.numerics import without_autocast


def run(call: Call) -> Tensor:
    """The output, (batch, heads, q_len, value_dim)."""
    in_one_block = call.query.shape[-2] <= row_blocks.BLOCK_ROWS
    if call.softcap is None and (in_one_block or not sdpa.materialises(call)):
        return sdpa.attend(call)
    call = _as_autocast(call)
    with without_autocast(call.query):
        return flex.attend(call) if flex.serves(call) else row_blocks.attend(call)


def run_sequences(ragged: Ragged) -> Tensor:
    """The output of every sequence, (1, heads, total, value_dim): all at once on a GPU, else one after the other."""
    cast = replace(ragged, row=_as_autocast(ragged.row))
    if varlen.serves(cast):
        with without_autocast(cast.row.query):
            return varlen.attend(cast)
    return joined([run(call) for call in ragged.calls()], ragged)


def joined(outputs: list[Tensor], ragged: Ragged) -> Tensor:
    """The outputs of the sequences in one row."""
    row = ragged.row
    return torch.cat(outputs, dim=-2) if outputs else row.query.new_empty(*row.query.shape[:-1], row.value.shape[-1])


def _as_autocast(call: Call) -> Call:
    """What autocast does to SDPA's arguments, for the kernels it does not know."""
    device = call.query.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return call
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    seen = call.visibility
    seen = seen if seen.mask is None else replace(seen, mask=cast(seen.mask))
    return replace(call, query=cast(call.query), key=cast(call.key), value=cast(call.value), visibility=seen)
