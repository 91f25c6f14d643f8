"""The sums of all layers -> the numbers of their records, worked out for all of them at once."""

import math
from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from attnscale.measure.statistics import STATISTICS, logged
from attnscale.train.record import LayerRecord
from attnscale.train.tally import ROWS, Tally


def records(layers: Mapping[str, Tally]) -> dict[str, LayerRecord]:
    """The numbers of every head of every layer.

    A gradient is that of the loss averaged over ranks, as data-parallel training averages it: each rank's own
    gradient over their number.
    """
    if not layers:
        return {}
    heads = [len(tally.packed) for tally in layers.values()]
    whole = Tally(torch.cat([tally.packed for tally in layers.values()]))
    stats, rows = whole.stats, whole.pooled.sums[:, ROWS]
    scale, query_norm, key_norm = (whole.weighted / torch.where(rows > 0, rows, torch.nan)[:, None]).unbind(-1)
    query_norm, key_norm = query_norm.sqrt(), key_norm.sqrt()
    gradients, ranks = whole.added[:, :2].sqrt(), whole.added[:, 2]
    size = (stats.variance + stats.mean.square()).sqrt()
    of_layer = {
        "scale": scale,
        "query_norm": query_norm,
        "key_norm": key_norm,
        "alignment": size / (scale * query_norm * key_norm).clamp(min=1e-300),
        "query_gradient": gradients[:, 0] / ranks,
        "key_gradient": gradients[:, 1] / ranks,
    }
    broken: list[bool] = ((rows > 0) & ~torch.isfinite(stats.std)).tolist()
    looked_at: list[int] = whole.pooled.rows.tolist()
    of_head = {name: of_layer[name] if entry.attribute is None else entry.of(stats) for name, entry in logged().items()}
    values = torch.where(rows > 0, torch.stack(list(of_head.values())), torch.nan).tolist()
    lists = dict(zip(of_head, values, strict=True))
    places = [slice(end - own, end) for own, end in zip(heads, accumulate(heads), strict=True)]
    return {
        layer: LayerRecord(sum(looked_at[at]), _known(lists, at), sum(broken[at]), keys=_mean(keys))
        for layer, at, keys in zip(layers, places, stats.keys.split(heads), strict=True)
    }


def _known(lists: Mapping[str, list[float]], at: slice) -> dict[str, list[float]]:
    """Of the heads of one layer; what may be unknown, as gradients may, only where a head has it."""
    values = {name: every[at] for name, every in lists.items()}
    return {name: found for name, found in values.items() if not STATISTICS[name].may_be_unknown or _any(found)}


def _mean(keys: Tensor) -> float | None:
    """Over the heads that have rows."""
    mean = float(keys.nanmean())
    return mean if math.isfinite(mean) else None


def _any(values: list[float]) -> bool:
    return not all(map(math.isnan, values))
