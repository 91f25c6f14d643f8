"""Nested tensors, as SDPA takes them -> an attention over sequences, and what makes its output one of them."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attnscale.attending.ragged import Ragged, aligned, scaled_sequences
from attnscale.attending.sequences import Wrapping, jagged, unnested, wrapping
from attnscale.errors import InputError
from attnscale.inputs import check_inputs, check_one_mask
from attnscale.numerics import Given, Result, uncompiled
from attnscale.rules.apply import Scale, can_be_traced
from attnscale.torch_internals import ragged_axis
from attnscale.visibility import Mask, Visibility, is_plain_mask


def any_nested(*tensors: Tensor) -> bool:
    """Whether one of them holds sequences of several lengths."""
    return any(isinstance(tensor, Tensor) and tensor.is_nested for tensor in tensors)


def in_graph(
    function: Callable[Given, Result], scale: Scale, *tensors: Tensor, sinks: Tensor | None = None
) -> Callable[Given, Result]:
    """Return the function, uncompiled where lengths or a rule are known to Python alone, or with sinks."""
    traced = sinks is None and can_be_traced(scale) and not any(map(_has_python_lengths, tensors))
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
) -> tuple[Ragged, Wrapping]:
    """An attention over the sequences of nested tensors, and what makes a row of results nested as they are."""
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
    ragged = scaled_sequences(own, theirs, values, seen, scale, enable_gqa, softcap, dropout_p)
    like = next(tensor for tensor in (query, key, value) if tensor.is_nested)
    return ragged, wrapping(query, like, ragged.rows)


def _are_as_long(first: Tensor, second: Tensor) -> bool:
    """Whether jagged tensors say by their shape that their sequences are as long: a graph knows no more of them."""
    if not all(tensor.is_nested and tensor.layout is torch.jagged and tensor.dim() == 4 for tensor in (first, second)):
        return False
    return bool(first.shape[2] == second.shape[2])


def sequences_see(attn_mask: Mask, is_causal: bool) -> Visibility:
    """What every sequence sees of itself; a mask of numbers would be of one length."""
    check_one_mask(attn_mask, is_causal)
    seen = Visibility.of(attn_mask, is_causal)
    if is_plain_mask(attn_mask) or seen.mask is not None or seen.documents is not None:
        raise InputError(
            "Expected no mask beside nested tensors, whose sequences see themselves alone, got one; pass "
            "is_causal=True or Visibility.causal(…), or padded tensors with the mask."
        )
    return seen


def even_parts(query: Tensor, key: Tensor, value: Tensor) -> tuple[list[Tensor], Wrapping] | None:
    """Of jagged tensors that are ragged before their heads, all the parts: they are of one size, and a plain batch."""
    tensors = query, key, value
    if not all(tensor.layout is torch.jagged and tensor.dim() > 3 and ragged_axis(tensor) == 1 for tensor in tensors):
        return None
    held = jagged(query)
    return [jagged(tensor).values() for tensor in tensors], lambda output: torch.nested.nested_tensor_from_jagged(
        output, held.offsets(), held.lengths()
    )
