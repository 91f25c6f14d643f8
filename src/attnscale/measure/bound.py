"""What no score of a head is above, told without looking at all of them."""

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.numerics import wide_dtype

BOUND_SLACK = 1e-5  # the rounding of a float32 norm, with room to spare


def max_bound(call: Call) -> Tensor:
    """Cauchy–Schwarz: no score of a head is above |a| · max‖q‖ · max‖k‖, plus the largest bias."""
    if not call.query.numel() or not call.key.numel():
        return call.query.new_full(call.query.shape[1:2], -torch.inf)
    dtype = wide_dtype(call.query)
    bound = _bound(call, dtype)
    if bound.device.type == "cpu" and dtype != torch.float64 and not bool(bound.isfinite().all()):
        bound = _bound(call, torch.float64)  # squares past float32
    return bound


def _bound(call: Call, dtype: torch.dtype) -> Tensor:
    queries, keys = (
        torch.linalg.vector_norm(tensor, dim=-1, dtype=dtype).amax(-1) for tensor in (call.query, call.key)
    )
    bound = abs(call.scale) * queries * (keys if call.group == 1 else keys.repeat_interleave(call.group, dim=1))
    if call.softcap is not None:
        bound = call.softcap * torch.tanh(bound / call.softcap)
    if call.visibility.bias is not None:
        bound = bound + call.visibility.bias.amax((-2, -1))
    highest: Tensor = (bound * (1 + BOUND_SLACK)).amax(0)
    return highest
