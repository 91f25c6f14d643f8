"""Largest score of each head that exceeds a limit, for QK-Clip at every step.

No score of a row can exceed ‖q‖ · max‖k‖ · scale. Rows with this bound within the limit are skipped, so a model with
scores in range only pays for one read of its queries and keys.
"""

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cuda.launch import kernels_take
from attnscale.numerics import wide_dtype, without_autocast

SLACK = 1 + 1e-4  # rounding may lift a score above the bound from the norms
BLOCK_SCORES = 2**20  # scores of one head computed at once, without the kernel


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
            for entry, head, rows in _rows_that_may_pass(limit, call):
                for some in rows.split(max(1, BLOCK_SCORES // call.key.shape[-2])):
                    highest = _scores(call, entry, head, some).amax().nan_to_num(torch.inf, torch.inf, -torch.inf)
                    largest[head] = torch.maximum(largest[head], highest.to(largest))


def _highest_added(call: Call) -> Tensor | None:
    """Return the largest value added to a score, at least 0; None if nothing is added."""
    bias = call.visibility.bias
    return None if bias is None else bias.amax().float().clamp(min=0.0)


def _rows_that_may_pass(limit: Tensor, call: Call) -> list[tuple[int, int, Tensor]]:
    """Return (entry, head, rows) that may exceed the limit; all rows on a GPU, to avoid a synchronisation."""
    query, key = call.query, call.key
    batch, heads, length, _ = query.shape
    if not query.numel() or not key.numel():
        return []
    if query.device.type != "cpu":
        every = torch.arange(length, device=query.device)
        return [(entry, head, every) for entry in range(batch) for head in range(heads)]
    longest = torch.linalg.vector_norm(key, dim=-1, dtype=wide_dtype(key)).amax(-1).repeat_interleave(call.group, 1)
    reach = torch.linalg.vector_norm(query, dim=-1, dtype=wide_dtype(query)) * longest[..., None]
    reach, added = reach * (abs(call.scale) * SLACK), _highest_added(call)
    reach = reach if added is None else reach + added
    passes = ~(reach <= limit)  # True for NaN
    found = passes.any(-1).nonzero().tolist()
    return [(entry, head, passes[entry, head].nonzero()[:, 0]) for entry, head in found]


def _scores(call: Call, entry: int, head: int, rows: Tensor) -> Tensor:
    """Return the scores of these rows of one head; −∞ for hidden keys."""
    query, key = call.query[entry, head, rows], call.key[entry, head // call.group]
    with without_autocast(query):  # autocast would compute the product in half precision
        scores = query.to(wide_dtype(query)) @ key.to(wide_dtype(key)).mT * call.scale
    scores = scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)
    added = call.visibility.at(entry, slice(head, head + 1)).added(rows, slice(0, key.shape[0]), scores)
    return scores if added is None else scores + added.reshape(-1, *added.shape[-2:])[0]
