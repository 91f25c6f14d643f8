"""Largest score of each head that exceeds a limit, for QK-Clip at every step.

No score of a row can exceed ‖q‖ · max‖k‖ · scale. Rows with this bound within the limit are skipped, so a model with
scores in range only pays for one read of its queries and keys.
"""

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cuda.launch import kernels_take
from attnscale.measure.row_blocks import measure_rows
from attnscale.numerics import wide_dtype, without_autocast

SLACK = 1 + 1e-4  # rounding may lift a score above the bound from the norms


def raise_largest_(largest: Tensor, limit: Tensor, calls: Tensor, call: Call) -> None:
    """Raise `largest`, float32 (heads,), to the largest score of each head that has a score above the limit.

    NaN counts as ∞. `calls` is incremented by one.

    >>> from attnscale.visibility import EVERYTHING
    >>> query, key = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 5, 4)
    >>> query[0, 1] *= 50
    >>> largest, calls = torch.full((2,), -torch.inf), torch.zeros(())
    >>> raise_largest_(largest, torch.tensor(100.0), calls, Call(query, key, key, EVERYTHING, 0.0, 1.0, None))
    >>> largest.tolist()
    [-inf, 200.0]
    """
    with torch.no_grad():
        if kernels_take(call):
            from attnscale.measure.cuda import masked_rows

            masked_rows.raise_largest_(largest, limit, calls, call, _highest_added(call))
        else:
            calls += 1.0
            with without_autocast(call.query):
                _raise_in_blocks(largest, limit, call)


def _highest_added(call: Call) -> Tensor | None:
    """Return the largest value added to a score, at least 0; None if nothing is added."""
    bias = call.visibility.bias
    return None if bias is None else bias.amax().float().clamp(min=0.0)


def _raise_in_blocks(largest: Tensor, limit: Tensor, call: Call) -> None:
    query, key, positions = call.query, call.key, None
    if not query.numel() or not key.numel():
        return
    longest = torch.linalg.vector_norm(key, dim=-1, dtype=wide_dtype(key)).amax(-1).repeat_interleave(call.group, 1)
    reach = torch.linalg.vector_norm(query, dim=-1, dtype=wide_dtype(query)) * longest[..., None]
    reach, added = reach * (abs(call.scale) * SLACK), _highest_added(call)
    may_pass = ~((reach if added is None else reach + added) <= limit)  # True for NaN
    if query.device.type == "cpu":  # all rows on a GPU, to avoid a synchronisation
        positions = may_pass.any(0).any(0).nonzero()[:, 0]
        if not len(positions):
            return
    highest = measure_rows(call, positions).max.amax((0, 2)).nan_to_num(torch.inf, torch.inf, -torch.inf)
    highest = highest.to(largest).masked_fill(~may_pass.any(2).any(0), -torch.inf)
    largest.copy_(torch.maximum(largest, highest))
