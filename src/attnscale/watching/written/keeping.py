"""A call written out, kept whole: queries and keys as they left their projections, and the values its weights met."""

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attnscale.tracing.coordinates import NOWHERE
from attnscale.tracing.lineage import Node
from attnscale.tracing.roles import Softmax
from attnscale.watching.kept import Kept, added_to, values_met
from attnscale.watching.written.axes import Axes
from attnscale.watching.written.operands import Operands

if TYPE_CHECKING:
    from attnscale.watching.written.written_call import WrittenCall


def kept_of(call: "WrittenCall", scales: Tensor, padding: Tensor | None) -> Kept | None:
    """All of it: what its scores have beyond scales · q·k stands in its visibility, so that together they are exact.

    None where its softmax runs over more than the keys of a query, or sinks stand among them.
    """
    axes, every = call.axes, torch.arange(call.axes.length)
    if axes.over_pairs or sum(_sinks(axes)) != int((axes.columns == NOWHERE).sum()):
        return None
    whole = Operands.of(axes, axes.groups.ravel(), every.numpy())
    query, key = (
        vectors.unflatten(0, axes.groups.shape) / _by_head(np.abs(way.factor).mean(1), vectors)
        for vectors, way in zip((whole.queries(), whole.keys()), call.ways, strict=True)
    )
    key = F.pad(key, (0, 0, *_sinks(axes))) if _sinks(axes) != (0, 0) else key
    predicted = query @ key.mT * _by_head(scales.numpy(), query)
    predicted = predicted if call.softcap is None else call.softcap * torch.tanh(predicted / call.softcap)
    scores, visible = call.rows_at(every)
    seen = added_to(predicted, scores, visible)
    seen = seen if padding is None else seen.without_rows(padding)
    return Kept(query, key, scales, seen, call.softcap)


def keep_values(axes: Axes, kept: Kept, softmax: Softmax, weights: Node, values: Tensor, side: int) -> None:
    """The values that the weights of a call met."""
    found = values_met(axes, softmax, weights, values, side)
    if found is not None and found.shape[-2] < len(axes.columns):
        found = F.pad(found, (0, 0, *_sinks(axes)))  # whose weights went nowhere
    kept.value = None if found is None or found.shape[-2] != len(axes.columns) else found


def _by_head(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like)[:, None, None]


def _sinks(axes: Axes) -> tuple[int, int]:
    """How many scores that are no key's stand before the keys, and behind them."""
    shown = np.flatnonzero(axes.columns != NOWHERE)
    return int(shown[0]), int(len(axes.columns) - 1 - shown[-1])
