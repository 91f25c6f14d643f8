"""Thinning: an old log as fewer records, each keeping the extremes of those it stands for.

The newest quarter stays as it is; of the older records, pairs of neighbours become one. A log that is thinned again
and again so has steps ever further apart the older they are, and no alarm and no largest score is ever lost.
"""

import math
from collections.abc import Sequence

from attnscale.train.record import LayerRecord, Record

KEPT = 4  # one record in four, the newest, is left alone
# Which end of a number is the bad one. All others count as bad when they are large.
BAD_WHEN_SMALL = frozenset({"entropy_ratio", "gradient_gain"})


def thin(records: Sequence[Record]) -> list[Record]:
    """The same run in fewer records: about 5/8 of them, the first one and the newest left as they are."""
    if len(records) < 2 * KEPT:
        return list(records)
    newest = len(records) - len(records) // KEPT
    old = records[1:newest]
    pairs = [old[at : at + 2] for at in range(0, len(old), 2)]
    return [records[0], *(pair[0] if len(pair) == 1 else _folded(*pair) for pair in pairs), *records[newest:]]


def _folded(first: Record, second: Record) -> Record:
    names = dict.fromkeys([*first.layers, *second.layers])
    return Record(
        first.step,
        first.time,
        {name: _worse(first.layers.get(name), second.layers.get(name)) for name in names},
        first.alarms + second.alarms,
        min(first.ranks, second.ranks),
        first.rank,
        second.step if second.until is None else second.until,
    )


def _worse(first: LayerRecord | None, second: LayerRecord | None) -> LayerRecord:
    if first is None or second is None:
        found = first or second
        assert found is not None
        return found
    names = dict.fromkeys([*first.numbers, *second.numbers])
    numbers = {name: _extremes(name, first.numbers.get(name), second.numbers.get(name)) for name in names}
    return LayerRecord(first.rows + second.rows, numbers, max(first.broken, second.broken))


def _extremes(name: str, first: list[float] | None, second: list[float] | None) -> list[float]:
    if first is None or second is None or len(first) != len(second):
        return second or first or []
    worse = min if name in BAD_WHEN_SMALL else max
    return [
        second[head] if math.isnan(value) else value if math.isnan(second[head]) else worse(value, second[head])
        for head, value in enumerate(first)
    ]
