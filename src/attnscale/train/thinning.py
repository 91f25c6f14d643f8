"""Thinning: an old log as fewer records, each keeping the extremes of those it stands for.

The first record and the newest quarter stay as they are. Of the others, neighbours that stand for the fewest steps
become one, so that all old records come to stand for about as many; no alarm and no largest score is ever lost.
"""

import math
from array import array
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

from attnscale.measure.statistics import STATISTICS
from attnscale.train.record import LayerRecord, Record

KEPT = 4  # one record in four, the newest, is left alone


def thin(records: Sequence[Record]) -> list[Record]:
    """The same run in three quarters of its records, or fewer; a run of less than eight is left as it is."""
    ends = groups([record.step for record in records], [record.last_step for record in records])
    return [reduce(folded, records[first:end]) for first, end in pairwise([0, *ends])]


def groups(steps: Sequence[int], last_steps: Sequence[int]) -> Sequence[int]:
    """Which neighbours become one: where each group ends, of records by their first and last steps."""
    found = _Spans(array("q", steps), array("q", last_steps), array("q", range(1, len(steps) + 1)))
    wanted = len(steps) * 3 // 4
    while len(found.ends) > wanted and len(found.ends) >= 2 * KEPT:
        found = _fold_narrow(found, len(found.ends) - len(found.ends) // KEPT)
    return found.ends


class _Spans(NamedTuple):
    """Groups of records: the first step of each, the last, and the record that ends it; 24 bytes each."""

    first: "array[int]"
    last: "array[int]"
    ends: "array[int]"


def _fold_narrow(given: _Spans, newest: int) -> _Spans:
    """From the second to the newest, neighbours folded that stand for at most twice the steps of the narrowest pair."""
    limit = 2 * min(given.last[at + 1] - given.first[at] + 1 for at in range(1, newest - 1))
    found = _Spans(*(column[:2] for column in given))
    is_new = False  # the last of them was folded, and is not to be folded again
    for at in range(2, len(given.ends)):
        if at < newest and not is_new and given.last[at] - found.first[-1] + 1 <= limit:
            found.last[-1], found.ends[-1], is_new = given.last[at], given.ends[at], True
        else:
            for column, own in zip(found, given, strict=True):
                column.append(own[at])
            is_new = False
    return found


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
        second.run,
        second.part,
        _highest(first.loss, second.loss),
        _highest(first.lr, second.lr),
    )


def _highest(first: float | None, second: float | None) -> float | None:
    """Of what is known; what is not a number is above all.

    >>> _highest(None, 2.0), _highest(3.0, 2.0), _highest(3.0, math.nan)
    (2.0, 3.0, nan)
    """
    known = [value for value in (first, second) if value is not None]
    return max(known, key=lambda value: (math.isnan(value), value), default=None)


def _worse(first: LayerRecord | None, second: LayerRecord | None) -> LayerRecord:
    if first is None or second is None:
        found = first or second
        assert found is not None
        return found
    names = dict.fromkeys([*first.numbers, *second.numbers])
    numbers = {name: _extremes(name, first.numbers.get(name), second.numbers.get(name)) for name in names}
    broken, clipped = max(first.broken, second.broken), _multiplied(first.clipped, second.clipped)
    keys = second.keys if first.keys is None else first.keys if second.keys is None else min(first.keys, second.keys)
    apart = first.apart or second.apart
    return LayerRecord(first.rows + second.rows, numbers, broken, second.softcap, clipped, keys, apart)


def _multiplied(first: Sequence[float] | None, second: Sequence[float] | None) -> Sequence[float] | None:
    """What was clipped between two records, and again between the second and the next."""
    if first is None or second is None or len(first) != len(second):
        return second or first
    return [one * other for one, other in zip(first, second, strict=True)]


def _extremes(name: str, first: list[float] | None, second: list[float] | None) -> list[float]:
    if first is None or second is None or len(first) != len(second):
        return second or first or []
    worse = min if STATISTICS[name].bad == "small" else max
    if not math.isnan(sum(first) + sum(second)):  # all are known
        return list(map(worse, first, second))
    return [
        second[head] if math.isnan(value) else value if math.isnan(second[head]) else worse(value, second[head])
        for head, value in enumerate(first)
    ]
