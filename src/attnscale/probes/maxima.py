"""The probe of QKClip: the largest score of each head since the last step, in a buffer on the model's device.

Each probed module carries a buffer with one row for each of its planned calls: the largest score of each head that
passed the limit, then the limit, whether queries and keys have the same positions, and how often it was called. The
last row counts calls that are not in the plan. A backward pass that recomputes a forward writes nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscale.attending.call import Call, fold
from attnscale.measure.largest import raise_largest_
from attnscale.probes.install import define_op, no_result
from attnscale.probes.intercept import KINDS, AttentionCall, ProbeKind, WrittenScores
from attnscale.probes.placement import Placement
from attnscale.torch_internals import copy_each_, in_backward
from attnscale.visibility import NEVER_A_SCORE, Visibility
from attnscale.watching.layer import Layer
from attnscale.watching.layout import layout_from

KIND = "maxima"
LIMIT, SAME_POSITIONS, CALLS = -3, -2, -1  # columns behind the heads
EXTRA_COLUMNS = 3
ROW_MAXIMA = "rows"  # in the place of a layout: (batch, heads, rows), the maximum of each row


def _probe_kernel(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    hidden_keys: Tensor | None,
    buffer: Tensor,
    scale: float,
    is_causal: bool,
    number: int,
) -> None:
    row = _row(buffer, number, query.shape[1], query.device)
    if row is None:
        return
    padding, written = None, (row.largest, row.limit, row.calls)
    if hidden_keys is not None and hidden_keys.shape[-1] == query.shape[2]:  # rows of padding do not count
        padding = hidden_keys.expand(len(query), -1) & (row.same_positions > 0)
    seen = Visibility.of(mask, is_causal)
    seen = seen if padding is None else seen.without_rows(padding)
    query, key, _, seen = fold(query, key, key, seen, enable_gqa=True)
    raise_largest_(*written, Call(query, key, key, seen, 0.0, scale, None))


def _probe_scores(scores: Tensor, buffer: Tensor, layout: str, number: int) -> None:
    heads = scores.shape[1] if layout == ROW_MAXIMA else layout_from(layout).heads
    row = _row(buffer, number, heads, scores.device)
    if row is None:
        return
    by_row = scores
    if layout != ROW_MAXIMA:
        by_head = layout_from(layout).scores_by_head(scores)  # (batch, heads, queries, keys)
        by_row = by_head.amax(-1)
        if by_head.shape[-1] == by_head.shape[-2]:
            is_hidden = by_head.amax((1, 2)) <= NEVER_A_SCORE
            by_row = by_row.masked_fill((is_hidden & (row.same_positions > 0)).unsqueeze(1), -torch.inf)
    highest = by_row.amax((0, 2)).nan_to_num(torch.inf, torch.inf, -torch.inf).to(buffer.dtype)  # NaN counts as ∞
    torch.maximum(row.largest, highest, out=row.largest)
    row.calls.add_(1.0)


def _count_unplanned(buffer: Tensor) -> None:
    _row(buffer, len(buffer), 0, buffer.device)


class _Row(NamedTuple):
    largest: Tensor  # (heads,)
    unused: Tensor  # where another call of the module has more heads
    limit: Tensor
    same_positions: Tensor
    calls: Tensor


def _row(buffer: Tensor, number: int, heads: int, device: torch.device) -> _Row | None:
    """Return the row of a call; None where nothing is written: for calls that are not planned, which are counted."""
    if in_backward() or buffer.device != device:  # recomputed; or the model was moved since
        return None
    rows, width = buffer.shape
    if number < rows - 1:
        return _Row(*buffer[number].split_with_sizes([heads, width - heads - EXTRA_COLUMNS, 1, 1, 1]))
    buffer[-1, CALLS] += 1.0
    return None


probe_kernel = define_op(
    "probe_max(Tensor query, Tensor key, Tensor? mask, Tensor? hidden_keys, Tensor(a!) buffer, float scale,"
    " bool is_causal, int number) -> ()",
    _probe_kernel,
    no_result,
)
probe_scores = define_op(
    "probe_max_of_scores(Tensor scores, Tensor(a!) buffer, str layout, int number) -> ()", _probe_scores, no_result
)
count_unplanned = define_op("count_unplanned(Tensor(a!) buffer) -> ()", _count_unplanned, no_result)


class _Maxima(ProbeKind):
    """In an eager run `buffer.data` is written: a checkpoint may have saved the buffer, and checks its version."""

    def at_function(self, call: AttentionCall, carried: Any, number: int, is_traced: bool) -> AttentionCall:
        if call.run_with_maxima is not None:
            return call._replace(run=partial(_run_with_maxima, call.run_with_maxima, carried, number))
        probe, buffer = _choose(is_traced, carried, probe_kernel, _probe_kernel)
        with torch.no_grad():
            query, key = call.query.detach(), call.key.detach()
            probe(query, key, call.mask, call.hidden_keys, buffer, call.scale, call.is_causal, number)
        return call

    def at_softmax(self, written: WrittenScores, carried: Any, number: int, is_traced: bool) -> None:
        probe, buffer = _choose(is_traced, carried, probe_scores, _probe_scores)
        with torch.no_grad():
            probe(written.scores.detach(), buffer, written.layout.code, number)

    def at_unplanned_softmax(self, carried: Any, is_traced: bool) -> None:
        count, buffer = _choose(is_traced, carried, count_unplanned, _count_unplanned)
        count(buffer)


KINDS[KIND] = _Maxima()


def _choose(is_traced: bool, buffer: Tensor, op: Any, function: Any) -> tuple[Any, Tensor]:
    """Return the op inside a graph, and its plain function in an eager run."""
    return (op, buffer) if is_traced and type(buffer) is not Tensor else (function, buffer.data)


def _run_with_maxima(
    run: Callable[[Tensor, Tensor], tuple[Any, Tensor]], buffer: Tensor, number: int, query: Tensor, key: Tensor
) -> Any:
    """Run a kernel that also returns the maximum of each row."""
    returned, maxima = run(query, key)
    with torch.no_grad():
        probe_scores(maxima.detach(), buffer, ROW_MAXIMA, number)
    return returned


def _empty_buffer(heads: int, limit: float, same_positions: Sequence[bool], device: torch.device) -> Tensor:
    buffer = torch.full((len(same_positions) + 1, heads + EXTRA_COLUMNS), -torch.inf, device=device)
    buffer[:, LIMIT], buffer[:, CALLS] = limit, 0.0
    buffer[:, SAME_POSITIONS] = torch.tensor([*same_positions, False], dtype=buffer.dtype)
    return buffer


class MaxBuffers:
    """The buffers of all probed modules, read as one tensor with a number for each head of each layer."""

    def __init__(self, placement: Placement, layers: Mapping[str, Layer], limit: float, device: torch.device) -> None:
        self._placement, self._buffers = placement, dict[str, Tensor]()
        rows: dict[str, list[tuple[int, int]]] = {}  # of each module: the id of a planned call, where its heads begin
        begin = 0
        for path in placement.modules:
            calls = placement.plan.modules[path].calls
            heads = max(call.template.heads for call in calls)
            same_positions = [call.template.attends_itself for call in calls]
            self._buffers[path] = _empty_buffer(heads, limit, same_positions, device)
            rows[path] = [(id(call), begin + at * (heads + EXTRA_COLUMNS)) for at, call in enumerate(calls)]
            begin += self._buffers[path].numel()
        self._empty = [buffer.clone() for buffer in self._buffers.values()]
        self._flat = [buffer.view(-1) for buffer in self._buffers.values()]
        found = [places for layer in layers.values() for places in _places_of_heads(layer, rows)]
        most = max((len(places) for places in found), default=1)
        padded = [places + places[-1:] * (most - len(places)) for places in found]
        ends = torch.tensor([buffer.numel() for buffer in self._buffers.values()], dtype=torch.int64).cumsum(0)
        self._unplanned = (ends + CALLS).to(device)
        self._places = torch.tensor(padded, dtype=torch.int64, device=device).reshape(-1, most)

    def installed(self) -> AbstractContextManager[None]:
        """Return a context in which the model writes to them."""
        return self._placement.probed(KIND, self._buffers.__getitem__)

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the largest score of each head that passed the limit, −∞ elsewhere; and how many were unplanned."""
        if not self._buffers:
            return torch.zeros(0), torch.zeros(())
        joined = torch.cat(self._flat)
        return joined[self._places].amax(-1), joined[self._unplanned].amax()

    def clear_(self) -> None:
        """Forget what was written."""
        copy_each_(list(self._buffers.values()), self._empty)

    def calls(self) -> list[bool]:
        """Return for each planned call whether it ran since they were cleared; waits for the device."""
        return [ran for buffer in self._buffers.values() for ran in (buffer[:-1, CALLS] > 0).tolist()]


def _places_of_heads(layer: Layer, rows: Mapping[str, list[tuple[int, int]]]) -> list[list[int]]:
    """Return the places of each head's numbers; the same rows serve a layer at every depth."""
    path = layer.module if layer.module in rows else ""
    attentions = list(dict.fromkeys(call for call, _ in rows[path]))
    own = attentions[layer.number - 1]
    return [[begin + head for call, begin in rows[path] if call == own] for head in range(layer.heads)]
