"""Course: a run of any length as few records of whole layers, for curves; its first and its last as they are."""

import math
from collections.abc import Sequence
from dataclasses import replace

from attnscale.measure.statistics import STATISTICS
from attnscale.train.record import LayerRecord, Record

MOST = 640  # records: twice as many as a curve has points


class Course:
    """Records in order of steps; when they become many, each two neighbours become one that keeps their extremes."""

    def __init__(self) -> None:
        self._first: Record | None = None
        self._last: Record | None = None
        self._between: list[Record] = []

    def add(self, record: Record) -> None:
        """Note the next record."""
        if self._last is not None and self._last is not self._first:
            self._between.append(_of_layers(self._last))
        if len(self._between) > MOST:
            pairs = zip(self._between[::2], self._between[1::2], strict=False)
            self._between = [merged(*pair) for pair in pairs] + self._between[len(self._between) & ~1 :]
        self._first, self._last = self._first or record, record

    @property
    def records(self) -> list[Record]:
        """At most MOST records and two, in order of steps."""
        ends = [each for each in (self._first, self._last) if each is not None]
        return [*ends[:1], *self._between, *ends[1:]] if self._first is not self._last else ends[:1]


def merged(first: Record, second: Record) -> Record:
    """Return two neighbours of a course as one: the bad end of every statistic, and the highest loss."""
    names = dict.fromkeys([*first.layers, *second.layers])
    layers = {name: _worse(first.layers.get(name), second.layers.get(name)) for name in names}
    loss, lr = _highest([first.loss, second.loss]), _highest([first.lr, second.lr])
    return replace(second, step=first.step, until=second.last_step, layers=layers, loss=loss, lr=lr)


def _worse(first: LayerRecord | None, second: LayerRecord | None) -> LayerRecord:
    if first is None or second is None:
        found = first or second
        assert found is not None  # a layer of one of both
        return found
    numbers = dict(second.numbers)
    for name, values in first.numbers.items():
        known = [value for value in (*values, *second.numbers.get(name, ())) if not math.isnan(value)]
        worse = min if STATISTICS[name].bad == "small" else max
        numbers[name] = [worse(known, default=math.nan)]
    return replace(second, numbers=numbers, broken=max(first.broken, second.broken))


def _highest(values: Sequence[float | None]) -> float | None:
    """Return the highest known value; NaN is above all."""
    known = [value for value in values if value is not None]
    return max(known, key=lambda value: (math.isnan(value), value), default=None)


def _of_layers(record: Record) -> Record:
    """Return a record with one number a layer in place of one a head."""
    layers = {
        name: replace(layer, numbers={number: [layer.whole(number)] for number in layer.numbers}, clipped=None)
        for name, layer in record.layers.items()
    }
    return replace(record, layers=layers, alarms=[])
