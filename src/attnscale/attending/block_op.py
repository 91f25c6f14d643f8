"""Attention in blocks of rows as one operator: for graphs that take any length, where a loop over rows would fix it.

Its gradients are formed in blocks of rows too, from weights that are formed again.
"""

from typing import Any

import torch
from torch import Tensor

from attnscale.attending import row_blocks, sdpa
from attnscale.attending.call import Call
from attnscale.attending.call_op import SCORES, arguments_of, call_of
from attnscale.attending.gradients import Dropped, attend_dropping, gradients_of
from attnscale.torch_internals import sizes_vary

ARGUMENTS = f"Tensor query, Tensor key, Tensor value, Tensor? seed, float dropout_p, {SCORES}"


def serves(call: Call) -> bool:
    """Whether a graph is being made for any length; a mask that learns needs autograd to look inside."""
    return sizes_vary(call.query.shape[-2], call.key.shape[-2]) and not call.mask_learns


def attend(call: Call) -> Tensor:
    """The output, (batch, heads, q_len, value_dim)."""
    seed = torch.randint(2**62, (1,), device=call.query.device) if call.dropout_p else None
    output: Tensor = attend_blocks(call.query, call.key, call.value, seed, call.dropout_p, *arguments_of(call))
    return output


def _given(
    query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None, dropout_p: float, *options: Any
) -> tuple[Call, Dropped | None]:
    return call_of(query, key, value, *options), None if seed is None else Dropped(dropout_p, seed)


@torch.library.custom_op("attnscale::attend_blocks", mutates_args=(), schema=f"({ARGUMENTS}) -> Tensor")
def attend_blocks(*given: Any) -> Tensor:
    """attend() as a node of a graph."""
    call, dropped = _given(*given)
    if dropped is not None:
        return attend_dropping(call, dropped).contiguous()
    output = sdpa.attend(call) if call.softcap is None else row_blocks.attend(call)
    return output.contiguous()


@attend_blocks.register_fake
def _attend_blocks_fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


@torch.library.custom_op(
    "attnscale::attend_blocks_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def attend_blocks_backward(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    call, dropped = _given(*given)
    of_query, of_key, of_value = (each.contiguous() for each in gradients_of(call, grad, dropped))
    return of_query, of_key, of_value


@attend_blocks_backward.register_fake
def _attend_blocks_backward_fake(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, seed, ctx.dropout_p, mask, documents_q, documents_k, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, seed, mask, documents_q, documents_k)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, seed, *hiding = ctx.saved_tensors
    found = attend_blocks_backward(grad, query, key, value, seed, ctx.dropout_p, *hiding, *ctx.options)
    return *found, None, None, *[None] * (len(hiding) + len(ctx.options))


attend_blocks.register_autograd(_backward, setup_context=_save)
