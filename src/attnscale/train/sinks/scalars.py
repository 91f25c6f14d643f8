"""A record as named numbers, for tools that draw curves."""

import math
from collections.abc import Iterable, Iterator

from attnscale.measure.statistics import logged
from attnscale.train.record import LEARNING, Record

PREFIX = "attnscale_"


def scalars(record: Record, names: Iterable[str] | None = None, *, heads: bool = False) -> Iterator[tuple[str, float]]:
    """Yield `attnscale_NUMBER/LAYER` and its value over the heads, where finite; tools group by what stands first.

    Where no names are given it is all numbers, with `attnscale/loss` and `attnscale/lr`. With `heads` each head has
    its own curve as well, `attnscale_NUMBER/LAYER/head_0`.
    """
    for name in LEARNING if names is None else ():
        value = getattr(record, name)
        if value is not None and math.isfinite(value):
            yield f"attnscale/{name}", value
    names = list(logged() if names is None else names)
    for layer, found in record.layers.items():
        for name in names:
            curves = {f"{PREFIX}{name}/{layer}": found.whole(name)}
            if heads:
                values = found.numbers.get(name, ())
                curves |= {f"{PREFIX}{name}/{layer}/head_{head}": value for head, value in enumerate(values)}
            yield from ((curve, value) for curve, value in curves.items() if math.isfinite(value))
