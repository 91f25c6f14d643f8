"""The sums of all layers -> the numbers of their records, worked out for all of them at once."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from attnscale.measure.pooled import SUMS, Known, Pooled
from attnscale.measure.statistics import logged
from attnscale.measure.stats import DENOMINATOR, NUMERATOR, ROOT_OF, ScoreStats
from attnscale.probes.calls import POOLED
from attnscale.train.record import LayerRecord
from attnscale.train.tally import ADDED, ROWS, WEIGHTED, Tally

NUMERATORS = torch.tensor([SUMS.index(NUMERATOR.get(name, name)) for name in DENOMINATOR])
DENOMINATORS = torch.tensor([SUMS.index(name) for name in DENOMINATOR.values()])


def records(layers: Mapping[str, Tally]) -> dict[str, LayerRecord]:
    """The numbers of every head of every layer.

    A gradient is that of the loss averaged over ranks, as data-parallel training averages it: each rank's own
    gradient over their number.
    """
    if not layers:
        return {}
    whole = Tally(torch.cat([tally.packed for tally in layers.values()]))
    pooled = _finished(whole.pooled)
    stats, rows = ScoreStats(len(whole.packed), exact=False, pool=Known(pooled)), pooled.sums[:, ROWS]
    has_rows = rows > 0
    weighted, added = whole.packed[:, POOLED:].split([len(WEIGHTED), len(ADDED)], dim=-1)
    scale, *squares = (weighted / torch.where(has_rows, rows, torch.nan)[:, None]).unbind(-1)
    query_norm, key_norm, cosine = (square.sqrt() for square in squares)
    query_gradient, key_gradient = (added[:, :2].sqrt() / added[:, 2:]).unbind(-1)
    size = (stats.variance + stats.mean.square()).sqrt()
    of_layer = {
        "scale_applied": scale,
        "query_norm": query_norm,
        "key_norm": key_norm,
        "alignment": torch.where(
            cosine.isnan(), (size / (scale * query_norm * key_norm).clamp(min=1e-300)).clamp(max=1.0), cosine
        ),
        "query_gradient": query_gradient,
        "key_gradient": key_gradient,
    }
    names = logged()
    optional = [name for name, entry in names.items() if entry.may_be_unknown]
    of_head = [of_layer[name] if entry.attribute is None else entry.of(stats) for name, entry in names.items()]
    keys, *values = torch.where(has_rows, torch.stack([stats.keys, *of_head]), torch.nan).numpy().tolist()
    looked_at, broken = torch.stack([pooled.rows, has_rows & ~torch.isfinite(stats.std)]).tolist()
    found, end = dict[str, LayerRecord](), 0
    for layer, tally in layers.items():
        at = slice(end, end := end + len(tally.packed))
        numbers = {name: every[at] for name, every in zip(names, values, strict=True)}
        for name in optional:
            if all(map(math.isnan, numbers[name])):
                del numbers[name]
        found[layer] = LayerRecord(sum(looked_at[at]), numbers, sum(broken[at]), keys=_mean(keys[at]))
    return found


def _finished(pooled: Pooled) -> Pooled:
    """The same with all statistics divided at once: one by one takes several times as many operations."""
    sums = pooled.sums.mT.contiguous()
    above, below = sums.index_select(0, NUMERATORS), sums.index_select(0, DENOMINATORS)
    ratios = dict(zip(DENOMINATOR, above / torch.where(below > 0, below, torch.nan), strict=True))
    roots = {name: ratios[square].sqrt() for name, square in ROOT_OF.items()}
    mean = torch.where(sums[SUMS.index("scores")] > 0, pooled.mean, torch.nan)
    return replace(pooled, finished=ratios | roots | {"mean": mean})


def _mean(keys: list[float]) -> float | None:
    """Over the heads that have rows."""
    known = [own for own in keys if math.isfinite(own)]
    return math.fsum(known) / len(known) if known else None
