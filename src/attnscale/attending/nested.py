"""Attention for nested tensors, with the shapes of SDPA: converted to sequences, and the output nested again."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.ragged import Layout, Ragged, Sequences, as_tokens, ragged_call
from attnscale.errors import InputError, ShapeError
from attnscale.inputs import check_one_mask
from attnscale.numerics import Params, Result, uncompiled
from attnscale.rules.apply import Scale, can_scale_as_one_row
from attnscale.torch_internals import known_longest, ragged_axis, unseen
from attnscale.visibility import Mask, Visibility, is_plain_mask


def any_nested(*tensors: Tensor) -> bool:
    """Return True if any of the tensors is nested."""
    return any(isinstance(tensor, Tensor) and tensor.is_nested for tensor in tensors)


def in_graph(function: Callable[Params, Result], scale: Scale, *tensors: Tensor) -> Callable[Params, Result]:
    """Return the function; uncompiled if it needs lengths or a rule that torch.compile cannot trace."""
    is_traced = can_scale_as_one_row(scale) and all(is_contiguous_jagged(x) for x in tensors if x.is_nested)
    return function if is_traced else uncompiled(function)


def is_contiguous_jagged(tensor: Tensor) -> bool:
    """Return True if the sequences are contiguous; those of a strided or narrowed nested tensor are not."""
    return tensor.layout is torch.jagged and jagged(tensor).lengths() is None


def jagged(tensor: Tensor) -> Any:
    """Return the tensor typed as Any: its static type lacks the methods of jagged tensors."""
    return tensor


def is_ragged_before_heads(*tensors: Tensor) -> bool:
    """Return True for jagged tensors whose attention has one length; SDPA treats them as a plain batch, too."""
    return all(tensor.layout is torch.jagged and tensor.dim() > 3 and ragged_axis(tensor) == 1 for tensor in tensors)


def nested_call(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Mask, is_causal: bool, *options: Any
) -> tuple[Ragged, Callable[[Tensor], Tensor]]:
    """Return an attention over the sequences of nested tensors, and a function that nests its output."""
    seen = sequences_see(attn_mask, is_causal)
    own, theirs, values = aligned({"query": query, "key": key, "value": value})
    like = next(tensor for tensor in (query, key, value) if tensor.is_nested)
    return ragged_call(own, theirs, values, seen, *options), partial(nested_like, like, own.layout)


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


def aligned(tensors: dict[str, Tensor]) -> list[Sequences]:
    """Return equally many sequences of query, key and value; a batch of one is repeated, as in SDPA."""
    found = {name: _sequences(name, tensor) for name, tensor in tensors.items()}
    count = max(each.layout.count for each in found.values())
    for name, each in found.items():
        if each.layout.count not in (1, count):
            raise ShapeError(f"Expected {count} sequences in {name}, like the other tensors, got {each.layout.count}.")
        if each.layout.count != count:
            lengths = [each.tokens.shape[-2]] * count
            found[name] = Sequences(each.tokens.repeat(1, 1, count, 1), Layout.of(lengths, each.tokens.device))
    keys, values = found["key"].layout, found["value"].layout
    if not unseen(keys.offsets) and not keys.equals(values):
        raise ShapeError("Expected one value per key in every sequence, got key and value of different lengths.")
    return list(found.values())


def _sequences(name: str, tensor: Tensor) -> Sequences:
    """Return the sequences of a tensor (batch, [heads,] length, width), nested in any layout or plain."""
    if tensor.dim() not in (3, 4):
        raise ShapeError(
            f"Expected {name} of shape (batch, heads, length, head_dim), nested like the other tensors or plain, "
            f"got {tensor.dim()} dimensions; flatten other leading dimensions into the batch."
        )
    if not tensor.is_nested or not is_contiguous_jagged(tensor):
        parts = [part if part.dim() == 3 else part.unsqueeze(0) for part in tensor.unbind()]
        lengths = [part.shape[-2] for part in parts]
        return Sequences(torch.cat(parts, dim=-2).unsqueeze(0), Layout.of(lengths, tensor.device))
    if ragged_axis(tensor) != tensor.dim() - 2:
        raise ShapeError(
            f"Expected {name} with a ragged length, (batch, heads, length, head_dim), got ragged dimension "
            f"{ragged_axis(tensor)}; put heads before the length with transpose(1, 2)."
        )
    row, offsets = jagged(tensor).values(), jagged(tensor).offsets()  # plain tensors: ops on nested ones are slow
    row = row.unsqueeze(0) if row.dim() == 3 else row[None, None]
    longest = None if unseen(offsets) else known_longest(tensor)
    return Sequences(row, Layout(offsets, longest, tensor.shape[-2]))


def nested_like(like: Tensor, layout: Layout, row: Tensor) -> Tensor:
    """Return results (1, heads, total, width) as a nested tensor with the layout and the dimensions of another."""
    nested = torch.nested.nested_tensor_from_jagged(as_tokens(row), layout.offsets)
    nested = nested.squeeze(2) if like.dim() == 3 else nested.transpose(1, 2)
    return nested if like.layout is torch.jagged else torch.nested.as_nested_tensor(list(nested.unbind()))
