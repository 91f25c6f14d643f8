"""One pass over an attention that gives its output too; as an operator where a mode looks at what runs.

Its products and exponentials are no kernel that such a mode knows: to a watched model it would be no attention at all.
"""

from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.call_op import SCORES, arguments_of, call_of
from attnscale.measure.row_blocks import measure_rows
from attnscale.measure.row_sums import ROW_FIELDS, RowSums

FOUND = ", ".join(f"Tensor {name}" for name in ("output", *ROW_FIELDS))


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


@torch.library.custom_op(
    "attnscale::one_pass",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {SCORES}) -> ({FOUND})",
)
def one_pass(*given: Any) -> tuple[Tensor, ...]:
    """The output, and the sums of every row in their order."""
    output, rows = passed_over(call_of(*given))
    return output, *(getattr(rows, name).clone() for name in ROW_FIELDS)
