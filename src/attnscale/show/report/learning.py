"""Loss and learning rate over a run, as its records have them."""

import math
from collections.abc import Callable, Sequence

from attnscale.show.numbers import number
from attnscale.show.report.courses import thinned
from attnscale.show.report.figures import Axis, Chart, Figure, Series
from attnscale.train.record import Record

MARKED = 40  # points that are told apart


def learning(name: str, records: Sequence[Record]) -> Figure | None:
    """A view each, of what is known; None where nothing is."""
    views = {
        "loss": _chart(records, "loss", lambda record: record.loss),
        "learning rate": _chart(records, "learning rate", lambda record: record.lr),
    }
    known = {title: chart for title, chart in views.items() if chart is not None}
    return Figure(name, known) if known else None


def _chart(records: Sequence[Record], title: str, of: Callable[[Record], float | None]) -> Chart | None:
    given = [(record.step, value) for record in records if (value := of(record)) is not None]
    known = [(step, value) for step, value in given if math.isfinite(value)]
    if not given:
        return None
    steps, values = [step for step, _ in known], [value for _, value in known]
    curve = thinned(Series(title, steps, values, values, values, mode="both" if len(steps) <= MARKED else "lines"))
    sentences = []
    if known:
        lowest = min(known, key=lambda point: point[1])
        sentences.append(
            f"The {title} went from {number(values[0])} at step {steps[0]} to {number(values[-1])} at step "
            f"{steps[-1]}; lowest {number(lowest[1])} at step {lowest[0]}."
        )
    broken = next((step for step, value in given if not math.isfinite(value)), None)
    sentences += [] if broken is None else [f"It was not a number from step {broken} on, or at times."]
    return Chart((curve,), Axis("step"), Axis(title), " ".join(sentences))
