"""The probe of QKClip: the largest score of each head since the last step, in a buffer on the model's device.

Each probed module holds a buffer with one row for each of its planned calls: the largest score of each head that
passed the limit, then the limit, and the number of times that the call ran. The last row counts calls that are not in
the plan. A backward pass that recomputes a forward writes nothing.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call, fold
from attnscale.measure.cuda.replay import Replay, replays
from attnscale.measure.largest import raise_largest_
from attnscale.probes.install import define_op, no_result
from attnscale.probes.intercept import KINDS, ROW_MAXIMA, AttentionCall, ProbeKind
from attnscale.probes.placement import Placement
from attnscale.torch_internals import copy_each_, in_backward
from attnscale.visibility import NEVER_A_SCORE, Visibility
from attnscale.watching.layer import Layer
from attnscale.watching.layout import layout_from

KIND = "maxima"
LIMIT, CALLS = -2, -1  # columns after those of the heads
EXTRA_COLUMNS = 2


def _probe_max(
    query: Tensor,
    key: Tensor,
    scores: Tensor | None,
    mask: Tensor | None,
    hidden_keys: Tensor | None,
    buffer: Tensor,
    layout: str,
    attends_itself: bool,
    is_causal: bool,
    scale: float,
    number: int,
) -> None:
    """Raise the maxima of a call in its row of the buffer; a call that is not planned is only counted."""
    if in_backward() or buffer.device != query.device:  # recomputed, or the model was moved to another device
        return
    if number >= len(buffer) - 1:
        buffer[-1, CALLS] += 1.0
        return
    if scores is not None:
        written = None if layout == ROW_MAXIMA else layout_from(layout)
        by_row = scores if written is None else _by_row(written.scores_by_head(scores), attends_itself)
        highest = by_row.amax((0, 2)).nan_to_num(torch.inf, torch.inf, -torch.inf)  # NaN counts as ∞
        largest = buffer[number, : len(highest)]
        torch.maximum(largest, highest.to(buffer.dtype), out=largest)
        buffer[number, CALLS] += 1.0
        return
    raise_largest = _raise_largest_again if query.is_cuda and replays(query, key, mask) else _raise_largest
    inputs = query, key, mask, hidden_keys
    raise_largest(inputs, (buffer,), number, buffer.shape[1], attends_itself, is_causal, scale)


def _raise_largest(
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    buffers: tuple[Tensor],
    number: int,
    width: int,  # of a buffer row; recorded addresses depend on it
    attends_itself: bool,
    is_causal: bool,
    scale: float,
) -> None:
    """Raise the maxima of a call of SDPA, in a row of the buffer."""
    (query, key, mask, hidden_keys), (buffer,) = inputs, buffers
    row, heads = buffer[number], query.shape[1]
    query, key, _, seen = fold(query, key, key, Visibility.of(mask, is_causal), enable_gqa=True)
    if attends_itself and hidden_keys is not None and hidden_keys.shape[-1] == query.shape[2]:
        seen = seen.without_rows(hidden_keys.expand(len(query), -1))  # rows of padding do not count
    raise_largest_(row[:heads], row[LIMIT], row[CALLS], Call(query, key, key, seen, 0.0, scale, None))


_raise_largest_again = Replay(_raise_largest)


def _by_row(scores: Tensor, attends_itself: bool) -> Tensor:
    """Return the largest score of each row, (batch, heads, queries); −∞ for rows of padding."""
    by_row = scores.amax(-1)
    if attends_itself and scores.shape[-1] == scores.shape[-2]:
        by_row = by_row.masked_fill((scores.amax((1, 2)) <= NEVER_A_SCORE).unsqueeze(1), -torch.inf)
    return by_row


probe_max = define_op(
    "probe_max(Tensor query, Tensor key, Tensor? scores, Tensor? mask, Tensor? hidden_keys, Tensor(a!) buffer,"
    " str layout, bool attends_itself, bool is_causal, float scale, int number) -> ()",
    _probe_max,
    no_result,
)


class _Maxima(ProbeKind):
    """Eager runs write to `buffer.data`, because a checkpoint may have saved the buffer and checks its version."""

    def at_call(self, call: AttentionCall, tensors: Any, number: int) -> None:
        is_eager = type(tensors) is Tensor
        call, buffer = (call, tensors.data) if is_eager else (call.detached(), tensors)
        probe: Callable[..., None] = _probe_max if is_eager else probe_max
        with torch.no_grad():
            probe(*call.tensors, buffer, *call.constants, number)

    def at_unplanned_softmax(self, tensors: Any) -> None:
        buffer = tensors.data if type(tensors) is Tensor else tensors
        with torch.no_grad():
            buffer[-1, CALLS] += 1.0


KINDS[KIND] = _Maxima()


def _empty_buffer(calls: int, heads: int, limit: float, device: torch.device) -> Tensor:
    buffer = torch.full((calls + 1, heads + EXTRA_COLUMNS), -torch.inf, device=device)
    buffer[:, LIMIT], buffer[:, CALLS] = limit, 0.0
    return buffer


class MaxBuffers:
    """The buffers of all probed modules, read as one tensor with a number for each head of each layer."""

    def __init__(self, placement: Placement, layers: Mapping[str, Layer], limit: float, device: torch.device) -> None:
        self._placement, self._buffers = placement, dict[str, Tensor]()
        rows: dict[str, list[tuple[int, int]]] = {}  # by module: (id, index of the first head) of each call
        begin = 0
        for path in placement.modules:
            calls = placement.plan.modules[path].calls
            heads = max(call.template.heads for call in calls)
            self._buffers[path] = _empty_buffer(len(calls), heads, limit, device)
            rows[path] = [(id(call), begin + at * (heads + EXTRA_COLUMNS)) for at, call in enumerate(calls)]
            begin += self._buffers[path].numel()
        self._empty = [buffer.clone() for buffer in self._buffers.values()]
        self._flat = [buffer.view(-1) for buffer in self._buffers.values()]
        of_heads = [places for layer in layers.values() for places in _places_of_heads(layer, rows)]
        most = max((len(places) for places in of_heads), default=1)
        padded = [places + places[-1:] * (most - len(places)) for places in of_heads]
        ends = torch.tensor([buffer.numel() for buffer in self._buffers.values()], dtype=torch.int64).cumsum(0)
        self._shape = len(padded), most
        self._places = torch.cat([torch.tensor(padded, dtype=torch.int64).flatten(), ends + CALLS]).to(device)

    def installed(self) -> AbstractContextManager[None]:
        """Return a context in which the model writes to the buffers."""
        return self._placement.probed(KIND, self._buffers.__getitem__)

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the largest score of each head that passed the limit, −∞ elsewhere; and counts of unplanned calls."""
        numbers = torch.cat(self._flat)[self._places]
        of_heads, unplanned = numbers.split([prod(self._shape), len(self._flat)])
        return of_heads.view(self._shape).amax(-1), unplanned

    def clear_(self) -> None:
        """Reset the buffers."""
        copy_each_(list(self._buffers.values()), self._empty)

    def calls(self) -> list[bool]:
        """Return True for each planned call that ran since the buffers were cleared; waits for the device."""
        return [ran for buffer in self._buffers.values() for ran in (buffer[:-1, CALLS] > 0).tolist()]


def _places_of_heads(layer: Layer, rows: Mapping[str, list[tuple[int, int]]]) -> list[list[int]]:
    """Return the indices of each head's numbers; a layer uses the same rows at every depth."""
    path = layer.module if layer.module in rows else ""
    attentions = list(dict.fromkeys(call for call, _ in rows[path]))
    own = attentions[layer.number - 1]
    return [[begin + head for call, begin in rows[path] if call == own] for head in range(layer.heads)]
