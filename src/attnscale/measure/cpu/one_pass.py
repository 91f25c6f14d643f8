"""One pass over an attention that gives its output too; as an operator where a mode looks at what runs.

Its products and exponentials are no kernel that such a mode knows: to a watched model it would be no attention at all.
"""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.row_blocks import measure_rows
from attnscale.measure.row_sums import RowSums
from attnscale.visibility import Visibility

SEEN = "Tensor? mask, Tensor? documents_q, Tensor? documents_k, SymInt? last, SymInt? first"
SCORES = f"{SEEN}, float scale, float? softcap"
FOUND = ", ".join(f"Tensor {name}" for name in ("output", *(each.name for each in fields(RowSums))))


def passed_over(call: Call) -> tuple[Tensor, RowSums]:
    """softmax(scores) V without gradients, and the sums of every row."""
    width = (*call.query.shape[:-1], call.value.shape[-1])
    output = torch.empty(width, dtype=torch.promote_types(call.query.dtype, torch.float32))
    rows = measure_rows(call, output=output)
    return output.to(call.query.dtype), rows


def passed_over_in_sight(call: Call) -> tuple[Tensor, RowSums]:
    """The same by an operator."""
    output, *sums = one_pass(call.query, call.key, call.value, *arguments_of(call))
    return output, RowSums(*sums)


def arguments_of(call: Call) -> tuple[Any, ...]:
    """All but the tensors that are multiplied."""
    seen = call.visibility
    mask = None if seen.mask is None else seen.mask.detach()
    own, theirs = (None, None) if seen.documents is None else seen.documents
    return mask, own, theirs, seen.last, seen.first, call.scale, call.softcap


def call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    documents_q: Tensor | None,
    documents_k: Tensor | None,
    last: int | None,
    first: int | None,
    scale: float,
    softcap: float | None,
) -> Call:
    """The attention again."""
    documents = None if documents_q is None or documents_k is None else (documents_q, documents_k)
    return Call(query, key, value, Visibility(last, first, mask, documents), 0.0, scale, softcap)


@torch.library.custom_op(
    "attnscale::one_pass",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {SCORES}) -> ({FOUND})",
)
def one_pass(*given: Any) -> tuple[Tensor, ...]:
    """The output, and the sums of every row in their order."""
    output, rows = passed_over(call_of(*given))
    return output, *(getattr(rows, each.name).clone() for each in fields(rows))
