"""Thinning: an old log as fewer records, each keeping the extremes of those it stands for.

The first record and the newest quarter stay as they are. Of the others, neighbours that stand for the fewest steps
become one, so that all old records come to stand for about as many; no alarm and no largest score is ever lost.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from attnscale.measure.statistics import STATISTICS
from attnscale.train.record import LayerRecord, Record

KEPT = 4  # one record in four, the newest, is left alone


def thin(records: Sequence[Record]) -> list[Record]:
    """The same run in three quarters of its records, or fewer; a run of less than eight is left as it is."""
    thinned, wanted = list(records), len(records) * 3 // 4
    while len(thinned) > wanted and len(thinned) >= 2 * KEPT:
        newest = len(thinned) - len(thinned) // KEPT
        thinned = [thinned[0], *_fold_narrow(thinned[1:newest]), *thinned[newest:]]
    return thinned


def _fold_narrow(records: list[Record]) -> list[Record]:
    """Neighbours folded that together stand for at most twice the steps of the narrowest such pair."""
    limit = 2 * min(_width(first, second) for first, second in pairwise(records))
    found = records[:1]
    is_new = False  # the last of them was folded, and is not to be folded again
    for record in records[1:]:
        if not is_new and _width(found[-1], record) <= limit:
            found[-1], is_new = folded(found[-1], record), True
        else:
            found.append(record)
            is_new = False
    return found


def _width(first: Record, second: Record) -> int:
    return second.last_step - first.step + 1


def folded(first: Record, second: Record) -> Record:
    """Two neighbours as one that keeps the extremes of both."""
    names = dict.fromkeys([*first.layers, *second.layers])
    return Record(
        first.step,
        first.time,
        {name: _worse(first.layers.get(name), second.layers.get(name)) for name in names},
        first.alarms + second.alarms,
        min(first.ranks, second.ranks),
        first.rank,
        second.last_step,
    )


def _worse(first: LayerRecord | None, second: LayerRecord | None) -> LayerRecord:
    if first is None or second is None:
        found = first or second
        assert found is not None
        return found
    names = dict.fromkeys([*first.numbers, *second.numbers])
    numbers = {name: _extremes(name, first.numbers.get(name), second.numbers.get(name)) for name in names}
    return LayerRecord(first.rows + second.rows, numbers, max(first.broken, second.broken), second.softcap)


def _extremes(name: str, first: list[float] | None, second: list[float] | None) -> list[float]:
    if first is None or second is None or len(first) != len(second):
        return second or first or []
    worse = min if STATISTICS[name].bad == "small" else max
    return [
        second[head] if math.isnan(value) else value if math.isnan(second[head]) else worse(value, second[head])
        for head, value in enumerate(first)
    ]
