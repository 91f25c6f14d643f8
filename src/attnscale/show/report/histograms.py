"""How many heads have how much of a statistic, at the first and at the last record of a run."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attnscale.measure.statistics import Statistic
from attnscale.show.numbers import number
from attnscale.show.report.figures import Axis, Chart, Figure, Series
from attnscale.show.report.freezing import Spread, freezes_at, spreads_of
from attnscale.show.report.heads import mapped
from attnscale.train.record import Record

FEWEST, MOST = 8, 40  # bins
WIDE = 50.0  # times the lowest: from here on bins are as wide as their place in the logarithm
ROOM = 1.15  # times the highest bar
Floats = NDArray[np.float64]


def histograms(name: str, records: Sequence[Record]) -> Figure | None:
    """A view a statistic; None where no head has a number."""
    first, last = records[0], records[-1]
    views = {statistic.long: chart for statistic in mapped() if (chart := _chart(statistic, first, last)) is not None}
    return Figure(name, views, choose="Count heads by") if views else None


def _chart(statistic: Statistic, first: Record, last: Record) -> Chart | None:
    now, then = _heads(last, statistic), _heads(first, statistic)
    if not len(now):
        return None
    spreads = spreads_of(last) if statistic.name == "spread" else []
    is_compared = last is not first and len(then) > 0
    seen = np.concatenate([now, then]) if is_compared else now
    limits = [spread.freezes for spread in spreads]
    edges, log = _edges(statistic, np.concatenate([seen, limits]), len(now))
    middles = list(np.sqrt(edges[1:] * edges[:-1]) if log else (edges[1:] + edges[:-1]) / 2)
    counts = [np.histogram(values, edges)[0].tolist() for values in (now, then)]
    top = ROOM * max(*counts[0], *(counts[1] if is_compared else [1]))
    series = [Series(f"heads at step {last.step}", middles, counts[0], mode="bars", tone=0)]
    if is_compared:
        series.append(Series(f"at step {first.step}", *_outline(edges, counts[1]), tone=1))
    if limits:
        series.append(Series(freezes_at(limits), [min(limits)] * 2, [0.0, top], tone="ink", dashed=True))
    notice = _notice(statistic, now, spreads)
    across = None if log else (float(edges[0]), float(edges[-1]))
    return Chart(tuple(series), Axis(statistic.long, log=log, range=across), Axis("heads", range=(0.0, top)), notice)


def _outline(edges: Floats, counts: Sequence[int]) -> tuple[list[float], list[float]]:
    """Bars without their sides.

    >>> _outline(np.array([0.0, 1.0, 2.0]), [3, 5])
    ([0.0, 0.0, 1.0, 1.0, 2.0, 2.0], [0.0, 3, 3, 5, 5, 0.0])
    """
    return np.repeat(edges, 2).tolist(), [0.0, *(count for count in counts for _ in range(2)), 0.0]


def _heads(record: Record, statistic: Statistic) -> Floats:
    """Every head that has a number."""
    values = [value for layer in record.layers.values() for value in layer.numbers.get(statistic.name, ())]
    found: Floats = np.array([value for value in values if math.isfinite(value)], dtype=np.float64)
    return found


def _edges(statistic: Statistic, seen: Floats, heads: int) -> tuple[Floats, bool]:
    """Of bins over all that is seen; whether they grow as their place does."""
    low, high, bins = float(seen.min()), float(seen.max()), min(MOST, max(FEWEST, 2 * math.isqrt(heads)))
    if statistic.highest is not None:
        return np.linspace(0.0, statistic.highest, bins + 1), False
    if low > 0 and high > WIDE * low:
        return np.geomspace(low / 1.05, high * 1.05, bins + 1), True
    margin = 0.05 * (high - low) or 0.05 * max(abs(high), 1e-9)
    return np.linspace(min(0.0, low - margin) if low >= 0 else low - margin, high + margin, bins + 1), False


def _notice(statistic: Statistic, heads: Floats, spreads: Sequence[Spread]) -> str:
    low, middle, high = np.quantile(heads, [0.1, 0.5, 0.9])
    told = (
        f"Half of the {len(heads)} heads have a {statistic.long} above {number(middle)}, one in ten below "
        f"{number(low)}, one in ten above {number(high)}."
    )
    if spreads:
        frozen = sum(spread.frozen for spread in spreads)
        told += f" {frozen} of them spread beyond the freezing point of the keys they see."
    return told
