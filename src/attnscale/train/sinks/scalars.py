"""A record as named numbers, for tools that draw curves."""

import math
from collections.abc import Iterator

from attnscale.measure.statistics import logged
from attnscale.train.record import Record


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """`attnscale/LAYER/NUMBER` and its value over the heads, where that is finite."""
    names = list(logged())
    for layer, found in record.layers.items():
        for name in names:
            value = found.whole(name)
            if math.isfinite(value):
                yield f"attnscale/{layer}/{name}", value
