"""A record as named numbers, for tools that draw curves."""

import math
from collections.abc import Iterable, Iterator

from attnscale.measure.statistics import logged
from attnscale.train.record import LEARNING, Record

PREFIX = "attnscale_"


def scalars(record: Record, names: Iterable[str] | None = None) -> Iterator[tuple[str, float]]:
    """`attnscale_NUMBER/LAYER` and its value over the heads, where finite; tools group by what stands first.

    Where no names are given it is all numbers, with `attnscale/loss` and `attnscale/lr`.
    """
    for name in LEARNING if names is None else ():
        value = getattr(record, name)
        if value is not None and math.isfinite(value):
            yield f"attnscale/{name}", value
    names = list(logged() if names is None else names)
    for layer, found in record.layers.items():
        for name in names:
            value = found.whole(name)
            if math.isfinite(value):
                yield f"{PREFIX}{name}/{layer}", value
