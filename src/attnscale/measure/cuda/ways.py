"""Which kernel serves an attention with exact statistics: decided once for each layout of query, key and value."""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from functools import cache

import torch
from torch import Tensor

from attnscale.attending.call import Call

HOPPER = (9, 0)  # the compute capability its kernel is written for
ENOUGH_PROGRAMS = 100  # of a decoding step: a program a key head; fewer leave most of a GPU idle
ALIGNMENT = 16  # bytes, of what is loaded at once


class Kernel(Enum):
    """What computes the output."""

    HOPPER = "hopper"
    TRITON = "triton"
    FOLDED = "folded"  # one query: the heads that share keys are the rows of one tile
    APART = "apart"  # torch's own kernel; the statistics by that for sampled rows, which cuts rows into spans of keys


@dataclass(frozen=True)
class Way:
    """How a kind of call is served."""

    kernel: Kernel
    kind: Hashable  # stands for all that the kernels' compilation depends on


WAYS: dict[Hashable, Way] = {}


def way_of(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> Way:
    """The way of these tensors."""
    kind = *layout_of(query), *layout_of(key), *layout_of(value), is_causal, scale > 0.0, scale == 0.0
    way = WAYS.get(kind)
    if way is None:
        way = WAYS[kind] = Way(_chosen(query, key, value, scale, is_causal), ("exact", kind))
    return way


def layout_of(tensor: Tensor) -> tuple[Hashable, ...]:
    """All that a kernel's compilation depends on of a tensor: layout, type, place and alignment."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device.index, tensor.data_ptr() % ALIGNMENT


def kind_of(call: Call, *written: Tensor) -> Hashable:
    """All that the compilation of a pass over what rows see depends on, where it writes to these."""
    seen = call.visibility
    given = [tensor for tensor in (seen.mask, *(seen.documents or ())) if tensor is not None]
    flags = seen.mask is None, seen.documents is None, seen.first is None, seen.last is None, call.softcap is None
    places = (tensor.data_ptr() % ALIGNMENT for tensor in written)
    return *(layout_of(tensor) for tensor in (call.query, call.key, *given)), *flags, *places


def _chosen(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> Kernel:
    batch, _, q_len, _ = query.shape
    if q_len == 1:
        return Kernel.FOLDED if batch * key.shape[1] >= ENOUGH_PROGRAMS or is_causal else Kernel.APART
    if on_hopper(query.device.index) and scale != 0.0:
        from attnscale.measure.cuda import hopper  # not before it is needed: a CPU may have no triton

        if hopper.supported(query, key, value):
            return Kernel.HOPPER
    return Kernel.TRITON


@cache
def on_hopper(device: int) -> bool:
    """Whether that GPU is one."""
    return torch.cuda.get_device_capability(device) == HOPPER
