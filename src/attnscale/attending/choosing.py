"""Which kernel runs an attention: torch's fused ones wherever they serve, then FlexAttention, then blocks of rows."""

from dataclasses import replace

import torch
from torch import Tensor

from attnscale.attending import block_op, flex, fused, row_blocks, sdpa
from attnscale.attending.call import Call
from attnscale.numerics import without_autocast


def run(call: Call) -> Tensor:
    """Return the output, (batch, heads, q_len, value_dim)."""
    if call.sinks is not None:
        return _run_with_sinks(as_autocast(call))
    by_sdpa = call.softcap is None and (not sdpa.materialises(call) or call.query.shape[-2] <= row_blocks.BLOCK_ROWS)
    as_operator = block_op.serves(call)
    if by_sdpa and (sdpa.takes_whole(call) or not as_operator):
        return sdpa.attend(call)
    call = as_autocast(call)
    with without_autocast(call.query):
        if not by_sdpa and flex.serves(call):
            return flex.attend(call)
        return block_op.attend(call) if as_operator else row_blocks.attend(call)


def _run_with_sinks(call: Call) -> Tensor:
    with without_autocast(call.query):
        if call.softcap is not None and flex.serves(call):
            return flex.attend(call)
        return fused.attend(call) if fused.serves(call) else row_blocks.attend(call)


def as_autocast(call: Call) -> Call:
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
