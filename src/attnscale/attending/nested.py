"""Attention for nested tensors, with the shapes of SDPA: converted to sequences, and the output nested again."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.ragged import Layout, Ragged, Sequences, aligned, as_tokens, scaled_sequences
from attnscale.errors import InputError, ShapeError
from attnscale.inputs import check_inputs, check_one_mask
from attnscale.numerics import Given, Result, uncompiled
from attnscale.rules.apply import Scale, can_be_traced
from attnscale.torch_internals import known_longest, ragged_axis, unseen
from attnscale.visibility import Mask, Visibility, is_plain_mask

Wrapping = Callable[[Tensor], Tensor]


def any_nested(*tensors: Tensor) -> bool:
    """Return True if any of the tensors is nested."""
    return any(isinstance(tensor, Tensor) and tensor.is_nested for tensor in tensors)


def in_graph(function: Callable[Given, Result], scale: Scale, *tensors: Tensor) -> Callable[Given, Result]:
    """Return the function; uncompiled if it needs lengths or a rule that torch.compile cannot trace."""
    traced = can_be_traced(scale) and not any(map(_has_python_lengths, tensors))
    return function if traced else uncompiled(function)


def _has_python_lengths(tensor: Tensor) -> bool:
    return tensor.is_nested and (tensor.layout is not torch.jagged or jagged(tensor).lengths() is not None)


def nested_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask,
    is_causal: bool,
    scale: Scale,
    enable_gqa: bool,
    softcap: float | None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Ragged, Wrapping]:
    """Return an attention over the sequences of nested tensors, and a function that nests its output."""
    seen = sequences_see(attn_mask, is_causal)
    own, theirs, values = (
        unnested(tensor, name) for tensor, name in ((query, "query"), (key, "key"), (value, "value"))
    )
    if own.layout.offsets is not theirs.layout.offsets and _are_as_long(query, key):
        theirs = replace(theirs, layout=own.layout)
    if theirs.layout.offsets is not values.layout.offsets and _are_as_long(key, value):
        values = replace(values, layout=theirs.layout)
    own, theirs, values = aligned(own, theirs, values)
    check_inputs(own.tokens, theirs.tokens, values.tokens, None, False, enable_gqa, softcap, dropout_p)
    ragged = scaled_sequences(own, theirs, values, seen, scale, enable_gqa, softcap, dropout_p, sinks)
    like = next(tensor for tensor in (query, key, value) if tensor.is_nested)
    return ragged, wrapping(query, like, ragged.rows)


def _are_as_long(first: Tensor, second: Tensor) -> bool:
    """Return True if two jagged tensors have the same symbolic length, the only test that works in a graph."""
    if not all(tensor.is_nested and tensor.layout is torch.jagged and tensor.dim() == 4 for tensor in (first, second)):
        return False
    return bool(first.shape[2] == second.shape[2])


def sequences_see(attn_mask: Mask, is_causal: bool) -> Visibility:
    """Return the visibility within each sequence; refuse a mask, which has one fixed length."""
    check_one_mask(attn_mask, is_causal)
    seen = Visibility.of(attn_mask, is_causal)
    if is_plain_mask(attn_mask) or seen.mask is not None or seen.documents is not None:
        raise InputError(
            "Expected no mask with nested tensors, because each of their sequences attends to itself only, got one; "
            "pass is_causal=True or Visibility.causal(…), or padded tensors with the mask."
        )
    return seen


def even_parts(query: Tensor, key: Tensor, value: Tensor) -> tuple[list[Tensor], Wrapping] | None:
    """Return a plain batch for tensors with the ragged dimension before their heads, and a function to nest its output.

    Return None for any other tensors.
    """
    tensors = query, key, value
    if not all(tensor.layout is torch.jagged and tensor.dim() > 3 and ragged_axis(tensor) == 1 for tensor in tensors):
        return None
    held = jagged(query)
    return [jagged(tensor).values() for tensor in tensors], lambda output: torch.nested.nested_tensor_from_jagged(
        output, held.offsets(), held.lengths()
    )


def unnested(tensor: Tensor, name: str) -> Sequences:
    """Return the sequences of a nested or plain tensor, (batch, [heads,] length, width)."""
    if not tensor.is_nested:
        return _even(tensor, name)
    if tensor.dim() not in (3, 4):
        raise ShapeError(
            f"Expected nested {name} of shape (batch, heads, length, head_dim), got {tensor.dim()} dimensions; "
            "flatten other leading dimensions into the batch."
        )
    if tensor.layout is torch.jagged and jagged(tensor).lengths() is None:
        if ragged_axis(tensor) != tensor.dim() - 2:
            raise ShapeError(
                f"Expected {name} with a ragged length, (batch, heads, length, head_dim), got ragged dimension "
                f"{ragged_axis(tensor)}; put heads before the length with transpose(1, 2)."
            )
        row, offsets = jagged(tensor).values(), jagged(tensor).offsets()  # plain tensors: ops on nested ones are slow
        row = row.unsqueeze(0) if row.dim() == 3 else row[None, None]
        return Sequences(row, Layout(offsets, None if unseen(offsets) else known_longest(tensor)))
    parts = [part if part.dim() == 3 else part.unsqueeze(0) for part in tensor.unbind()]
    lengths = [part.shape[-2] for part in parts]
    return Sequences(torch.cat(parts, dim=-2).unsqueeze(0), Layout.of(lengths, tensor.device))


def jagged(tensor: Tensor) -> Any:
    """Return the tensor typed as Any: its static type lacks the methods of jagged tensors."""
    return tensor


def _even(tensor: Tensor, name: str) -> Sequences:
    if tensor.dim() != 4:
        raise ShapeError(
            f"Expected {name} to be nested like the other tensors, or of shape (batch, heads, length, head_dim), "
            f"got shape {tuple(tensor.shape)}."
        )
    batch, _, length, _ = tensor.shape
    row = tensor.transpose(0, 1).flatten(1, 2).unsqueeze(0)
    return Sequences(row, Layout.even(batch, length, tensor.device))


def wrapping(query: Tensor, like: Tensor, layout: Layout) -> Wrapping:
    """Return a function that converts a row of results (1, heads, total, width) to a nested tensor like `like`."""
    flat = query.dim() == 3

    def as_jagged(row: Tensor) -> Tensor:
        known = (min(layout.lengths), max(layout.lengths)) if _is_known(layout) else (None, None)
        made = torch.nested.nested_tensor_from_jagged(as_tokens(row), layout.offsets, None, None, *known)
        return made.squeeze(2) if flat else made.transpose(1, 2)

    def strided(row: Tensor) -> Tensor:
        parts = row.squeeze(0).split(layout.lengths, dim=-2)
        return torch.nested.as_nested_tensor([part.squeeze(0) if flat else part for part in parts])

    return as_jagged if like.layout is torch.jagged else strided


def _is_known(layout: Layout) -> bool:
    return layout.count > 0 and (layout.is_at_hand or "lengths" in vars(layout)) and not unseen(layout.offsets)
