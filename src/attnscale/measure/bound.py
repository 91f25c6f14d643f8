"""What no score of a head is above, told without looking at all of them."""

import numpy as np
import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.lengths import longest

BOUND_SLACK = 1e-5  # the rounding of a float32 norm, with room to spare


def max_bound(call: Call, lse: Tensor | None = None) -> Tensor:
    """Cauchy–Schwarz: no score of a head is above |a| · max‖q‖ · max‖k‖, plus the largest bias.

    Nor is one above the lse of its row, where a kernel left that of all rows, and each sees a key.
    """
    if not call.query.numel() or not call.key.numel():
        return call.query.new_full(call.query.shape[1:2], -torch.inf)
    if lse is not None and call.visibility.is_plain:
        highest = lse.detach().numpy().max((0, 2))
        return torch.from_numpy(highest + (np.abs(highest) + 1.0) * BOUND_SLACK)
    queries, keys = longest(call.query), longest(call.key)
    keys = keys if call.group == 1 else keys.repeat_interleave(call.group, dim=1)
    bound = queries * keys * abs(call.scale)
    if call.softcap is not None:
        bound = call.softcap * torch.tanh(bound / call.softcap)
    if call.visibility.bias is not None:
        bound = bound + call.visibility.bias.amax((-2, -1))
    return (bound * (1 + BOUND_SLACK)).amax(0)
