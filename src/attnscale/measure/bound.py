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
    queries, keys = _longest(call.query), _longest(call.key)
    bound = abs(call.scale) * queries * (keys if call.group == 1 else keys.repeat_interleave(call.group, dim=1))
    if call.softcap is not None:
        bound = call.softcap * torch.tanh(bound / call.softcap)
    if call.visibility.bias is not None:
        bound = bound + call.visibility.bias.amax((-2, -1))
    highest: Tensor = (bound * (1 + BOUND_SLACK)).amax(0)
    return highest


def _longest(vectors: Tensor) -> Tensor:
    """The largest ‖x‖ of each head, (batch, heads); on a CPU, in float64 where its square is past float32."""
    longest: Tensor = torch.linalg.vector_norm(vectors, dim=-1, dtype=wide_dtype(vectors)).amax(-1)
    if longest.device.type == "cpu" and bool(longest.isinf().any()):
        longest = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64).amax(-1)
    return longest
