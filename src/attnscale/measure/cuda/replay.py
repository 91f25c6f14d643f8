"""Kernels launched again with other tensors, for probes, which measure calls of the same layouts at every step.

Between a call and its kernels lie checks, views and lookups that take the host several times as long as the launches.
The first run of a function records its launches; later runs repeat them with the pointers of their own tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscale.measure.cuda.launch import RECORDING, Launch, layout_key
from attnscale.torch_internals import current_stream

DEFAULT_STREAM = 0  # which no CUDA graph can capture
MOST_RECORDINGS = 1024  # of one function; beyond it, all are made again

Given = tuple[Tensor | None, ...]
Function = Callable[..., None]


class _Step(NamedTuple):
    """One recorded launch. `pointers` are (number of the tensor, bytes after its begin)."""

    launch: Callable[..., None]
    pointers: list[tuple[int, int]]
    others: tuple[Any, ...]


class _Recording(NamedTuple):
    steps: list[_Step]
    constants: list[Tensor]  # scratch memory and constants of the function; kept, since each run uses them again
    constants_at: list[int]  # where they begin


class Replay:
    """A function of tensors that launches kernels, and does nothing else but making views and allocating scratch.

    It is called as function(given, own, *constants). The tensors `given` may have any layout, and any number of
    recordings is kept for different ones; `own` are contiguous, and always of the same layout for the same `given`.
    Scratch memory is shared by all runs.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._recordings: dict[object, _Recording] = {}

    def __call__(self, given: Given, own: tuple[Tensor, ...], *constants: Any) -> None:
        device = own[0].device.index
        begins = [0 if each is None else each.data_ptr() for each in (*given, *own)]
        if not self._can_replay(device, begins):
            self._function(given, own, *constants)
            return
        layouts = [None if each is None else layout_key(each) for each in given]
        key = (device, *constants, *layouts)
        recording = self._recordings.get(key)
        if recording is None:
            self._record(key, given, own, constants)
            return
        if not recording.steps:  # no kernel takes these tensors
            self._function(given, own, *constants)
            return
        begins += recording.constants_at
        for step in recording.steps:
            step.launch(*[begins[number] + offset for number, offset in step.pointers], *step.others)

    def _can_replay(self, device: int | None, begins: Sequence[int]) -> bool:
        """Return False for tensors that cannot be told apart, and where the memory of a recording must not be used.

        Other streams than the default one may run at the same time, or prepare a CUDA graph with memory of its own.
        """
        if device is None or device != torch.cuda.current_device() or current_stream(device) != DEFAULT_STREAM:
            return False
        known = [begin for begin in begins if begin]
        is_apart = len(set(known)) == len(known)
        return is_apart and RECORDING.launches is None

    def _record(self, key: object, given: Given, own: tuple[Tensor, ...], constants: tuple[Any, ...]) -> None:
        launches: list[tuple[Launch, tuple[int, ...], tuple[Any, ...]]] = []
        RECORDING.launches = launches
        try:
            self._function(given, own, *constants)
        finally:
            RECORDING.launches = None
        if len(self._recordings) >= MOST_RECORDINGS:
            self._recordings.clear()
        kept: list[Tensor] = []
        steps = [_step(launch, grid, arguments, given, own, kept) for launch, grid, arguments in launches]
        self._recordings[key] = _Recording(steps, kept, [each.data_ptr() for each in kept])


def replays(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Return True if kernels read these tensors where they lie: a replay would miss a copy that is made for them."""
    takes_mask = mask is None or (mask.dim() == 4 and mask.dtype == torch.bool and mask.shape[-1] == key.shape[2])
    return takes_mask and query.stride(-1) == key.stride(-1) == 1


def _step(
    launch: Launch,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    given: Given,
    own: Sequence[Tensor],
    kept: list[Tensor],
) -> _Step:
    tensors = [each for each in arguments if isinstance(each, Tensor)]  # they come first
    begins = {each.data_ptr(): number for number, each in reversed(list(enumerate(given))) if each is not None}
    pointers = []
    for tensor in tensors:
        at = tensor.data_ptr()
        inside = [
            (len(given) + number, at - each.data_ptr())
            for number, each in enumerate(own)
            if 0 <= at - each.data_ptr() < max(each.nbytes, 1)
        ]
        if at in begins:
            pointers.append((begins[at], 0))
        elif inside:
            pointers.append(inside[0])
        else:
            pointers.append((len(given) + len(own) + len(kept), 0))
            kept.append(tensor)
    return _Step(launch.on(grid), pointers, tuple(arguments[len(tensors) :]))
