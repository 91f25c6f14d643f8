"""Replay kernel launches with other tensors, for probes: they measure calls with the same layouts at every step.

Before its launches, a call runs checks, views and lookups, which take the host several times as long as the launches.
The first run of a function records its launches; later runs repeat them with the pointers of their own tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscale.measure.cuda.launch import RECORDING, Launch, layout_key
from attnscale.torch_internals import current_stream

DEFAULT_STREAM = 0  # no CUDA graph can capture this stream
MOST_RECORDINGS = 1024  # per function; at this limit, all recordings are discarded

Inputs = tuple[Tensor | None, ...]
Function = Callable[..., None]


class _Step(NamedTuple):
    """One recorded launch. `pointers` are (number of the tensor, offset in bytes)."""

    launch: Callable[..., None]
    pointers: list[tuple[int, int]]
    others: tuple[Any, ...]


class _Recording(NamedTuple):
    steps: list[_Step]
    constants: list[Tensor]  # scratch memory and constants of the function; kept, since each run uses them again
    constants_at: list[int]  # their addresses


class Replay:
    """A function of tensors that launches kernels, makes views and allocates scratch memory, and has no other effects.

    It is called as function(inputs, buffers, *constants). The inputs may have any layout: each combination of layouts
    has its own recording. The buffers are contiguous, and their layouts depend only on those of the inputs.
    All runs share the scratch memory.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._recordings: dict[object, _Recording] = {}

    def __call__(self, inputs: Inputs, buffers: tuple[Tensor, ...], *constants: Any) -> None:
        device = buffers[0].device.index
        begins = [0 if each is None else each.data_ptr() for each in (*inputs, *buffers)]
        if not self._can_replay(device, begins):
            self._function(inputs, buffers, *constants)
            return
        layouts = [None if each is None else layout_key(each) for each in inputs]
        key = (device, *constants, *layouts)
        recording = self._recordings.get(key)
        if recording is None:
            self._record(key, inputs, buffers, constants)
            return
        if not recording.steps:  # no kernel takes these tensors
            self._function(inputs, buffers, *constants)
            return
        begins += recording.constants_at
        for step in recording.steps:
            step.launch(*[begins[number] + offset for number, offset in step.pointers], *step.others)

    def _can_replay(self, device: int | None, begins: Sequence[int]) -> bool:
        """Return False if two tensors have the same address, or if the scratch memory must not be used here.

        Other streams may run at the same time as the default stream, or capture a CUDA graph with separate memory.
        """
        if device is None or device != torch.cuda.current_device() or current_stream(device) != DEFAULT_STREAM:
            return False
        known = [begin for begin in begins if begin]
        is_apart = len(set(known)) == len(known)
        return is_apart and RECORDING.launches is None

    def _record(self, key: object, inputs: Inputs, buffers: tuple[Tensor, ...], constants: tuple[Any, ...]) -> None:
        launches: list[tuple[Launch, tuple[int, ...], tuple[Any, ...]]] = []
        RECORDING.launches = launches
        try:
            self._function(inputs, buffers, *constants)
        finally:
            RECORDING.launches = None
        if len(self._recordings) >= MOST_RECORDINGS:
            self._recordings.clear()
        kept: list[Tensor] = []
        steps = [_step(launch, grid, arguments, inputs, buffers, kept) for launch, grid, arguments in launches]
        self._recordings[key] = _Recording(steps, kept, [each.data_ptr() for each in kept])


def replays(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Return True if kernels read these tensors without a copy, because a replay would not repeat the copy."""
    takes_mask = mask is None or (mask.dim() == 4 and mask.dtype == torch.bool and mask.shape[-1] == key.shape[2])
    return takes_mask and query.stride(-1) == key.stride(-1) == 1


def _step(
    launch: Launch,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    inputs: Inputs,
    buffers: Sequence[Tensor],
    kept: list[Tensor],
) -> _Step:
    tensors = [each for each in arguments if isinstance(each, Tensor)]  # they come first
    begins = {each.data_ptr(): number for number, each in reversed(list(enumerate(inputs))) if each is not None}
    pointers = []
    for tensor in tensors:
        at = tensor.data_ptr()
        inside = [
            (len(inputs) + number, at - each.data_ptr())
            for number, each in enumerate(buffers)
            if 0 <= at - each.data_ptr() < max(each.nbytes, 1)
        ]
        if at in begins:
            pointers.append((begins[at], 0))
        elif inside:
            pointers.append(inside[0])
        else:
            pointers.append((len(inputs) + len(buffers) + len(kept), 0))
            kept.append(tensor)
    return _Step(launch.on(grid), pointers, tuple(arguments[len(tensors) :]))
