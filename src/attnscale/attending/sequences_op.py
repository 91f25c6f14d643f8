"""Attention over sequences as one operator: in a graph lengths stay numbers of the device until it is run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.attending.gradients import Dropped, attend_dropping, gradients_of
from attnscale.attending.ragged import Ragged
from attnscale.attending.sequences import Layout
from attnscale.visibility import Visibility

TENSORS = "Tensor query, Tensor key, Tensor value, Tensor starts_q, Tensor starts_k, Tensor? seed"
SETTINGS = (
    "SymInt? longest_q, SymInt? longest_k, int? last, int? first, bool from_the_end, "
    "float dropout_p, float scale, float? softcap"
)
ARGUMENTS = f"{TENSORS}, {SETTINGS}"
GIVEN = len(ARGUMENTS.split(","))


def arguments_of(ragged: Ragged) -> tuple[Any, ...]:
    """An attention over sequences as the arguments of an operator."""
    row, seen = ragged.row, ragged.row.visibility
    seed = torch.randint(2**62, (1,), device=row.query.device) if row.dropout_p else None
    tensors = row.query, row.key, row.value, ragged.rows.offsets, ragged.keys.offsets, seed
    longest = ragged.rows.known_longest, ragged.keys.known_longest
    return *tensors, *longest, seen.last, seen.first, seen.from_the_end, row.dropout_p, row.scale, row.softcap


def ragged_of(
    query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor, seed: Tensor | None, *settings: Any
) -> tuple[Ragged, Dropped | None]:
    """The attention again, without sequences that have neither rows nor keys, and what is dropped of it."""
    longest_q, longest_k, last, first, from_the_end, dropout_p, scale, softcap = settings
    for name, starts, row in (("query", starts_q, query), ("key", starts_k, key)):
        Layout(starts).check_starts(f"the starts of the {name}")
        Layout(starts).check_end(name, row)
    some = (starts_q.diff() > 0) | (starts_k.diff() > 0)
    rows, keys = (torch.cat([starts[:1], starts[1:][some]]) for starts in (starts_q, starts_k))
    call = Call(query, key, value, Visibility(last, first, from_the_end=from_the_end), 0.0, scale, softcap)
    ragged = Ragged(call, Layout(rows, longest_q), Layout(keys, longest_k))
    return ragged, None if seed is None else Dropped(dropout_p, seed)


def attended(ragged: Ragged, dropped: Dropped | None, attend: Callable[[Ragged], Tensor]) -> Tensor:
    """The output; without dropout by whatever kernel attends."""
    if dropped is None:
        return attend(ragged).contiguous()
    parts = [attend_dropping(call, dropped) for call in ragged.calls()]
    return torch.cat(parts, dim=-2).contiguous() if parts else output_of(ragged.row.query, ragged.row.value)


def output_of(query: Tensor, value: Tensor) -> Tensor:
    """Room for the output, (1, heads, total, value_dim)."""
    return query.new_empty(*query.shape[:-1], value.shape[-1])


@torch.library.custom_op(
    "attnscale::sequences_backward", mutates_args=(), schema=f"(Tensor grad, {ARGUMENTS}) -> Tensor[]"
)
def sequences_backward(grad: Tensor, *given: Any) -> list[Tensor]:
    """The gradients of query, key and value."""
    ragged, dropped = ragged_of(*given)
    grads = grad.split(ragged.rows.lengths, dim=-2)
    parts = [gradients_of(call, each, dropped) for call, each in zip(ragged.calls(), grads, strict=True)]
    if not parts:
        return [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in given[:3]]
    return [torch.cat(each, dim=-2).contiguous() for each in zip(*parts, strict=True)]


@sequences_backward.register_fake
def _sequences_backward_fake(grad: Tensor, *given: Any) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in given[:3]]


def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """What the backward needs of an operator with these arguments."""
    ctx.save_for_backward(*inputs[:6])
    ctx.settings = inputs[6:GIVEN]


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of an operator with these arguments."""
    found = sequences_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return *found, *[None] * (GIVEN - 3)
