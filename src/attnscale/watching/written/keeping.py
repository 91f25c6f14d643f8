"""A call written out, kept whole: queries and keys as they left their projections, and the values its weights met."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attnscale.tracing.lineage import Node
from attnscale.tracing.roles import Softmax
from attnscale.visibility import Visibility
from attnscale.watching.kept import Kept, added_to, values_met
from attnscale.watching.written.axes import Axes
from attnscale.watching.written.operands import Operands

if TYPE_CHECKING:
    from attnscale.watching.written.written_call import WrittenCall


def kept_of(call: "WrittenCall", scales: Tensor, padding: Tensor | None) -> Kept:
    """All of it: what its scores have beyond scales · q·k stands in its visibility, so that together they are exact."""
    axes, every = call.axes, torch.arange(call.axes.length)
    whole = Operands.of(axes, axes.groups.ravel(), every.numpy())
    by_row = whole.has_keys_by_row
    query, key = whole.queries(), whole.keys_by_row() if by_row else whole.keys()
    query, key = (
        vectors.unflatten(0, axes.groups.shape) / _by_head(np.abs(way.factor).mean(1), vectors, 4 + (by_row and at))
        for at, (vectors, way) in enumerate(zip((query, key), call.ways, strict=True))
    )
    key = F.pad(key, (0, 0, *_sinks(axes))) if _sinks(axes) != (0, 0) else key
    predicted = (query.unsqueeze(-2) @ key.mT).squeeze(-2) if by_row else query @ key.mT
    predicted = predicted * _by_head(scales.numpy(), predicted, 4)
    predicted = predicted if call.softcap is None else call.softcap * torch.tanh(predicted / call.softcap)
    scores, visible = call.rows_at(every)
    seen = added_to(predicted, scores, visible)
    seen = seen if padding is None else seen.without_rows(padding)
    kept = Kept(query, key, scales, seen, call.softcap)
    return _rows_as_entries(kept, scores) if by_row else kept


def keep_values(axes: Axes, kept: Kept, softmax: Softmax, weights: Node, values: Tensor, side: int) -> None:
    """The values that the weights of a call met."""
    found = values_met(axes, softmax, weights, values, side)
    if found is not None and found.shape[-2] < len(axes.columns):
        found = F.pad(found, (0, 0, *_sinks(axes)))  # whose weights went nowhere
    if found is None or found.shape[-2] != len(axes.columns):
        return
    if kept.keys_by_row:
        found = found.unsqueeze(1).expand(-1, kept.keys_by_row, -1, -1, -1).flatten(0, 1)
    kept.value = found


def _by_head(values: np.ndarray, like: Tensor, rank: int) -> Tensor:
    return torch.from_numpy(np.asarray(values)).to(like).view(-1, *(1,) * (rank - 2))


def _sinks(axes: Axes) -> tuple[int, int]:
    """How many scores that are no key's stand before the keys, and behind them."""
    shown = np.flatnonzero(axes.columns >= 0)
    return int(shown[0]), int(len(axes.columns) - 1 - shown[-1])


def _rows_as_entries(kept: Kept, scores: Tensor) -> Kept:
    """Rows that have keys of their own, as entries of one row each."""
    rows = scores.shape[-2]
    every = slice(0, rows)
    added = kept.visibility.added(every, slice(0, scores.shape[-1]), scores)
    mask = None if added is None else added.expand_as(scores).transpose(1, 2).flatten(0, 1).unsqueeze(-2)
    return replace(
        kept,
        query=kept.query.transpose(1, 2).flatten(0, 1).unsqueeze(-2),
        key=kept.key.transpose(1, 2).flatten(0, 1),
        visibility=Visibility(mask=mask),
        keys_by_row=rows,
    )
