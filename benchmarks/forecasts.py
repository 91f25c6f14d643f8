"""Test if forecasts and alarms come true: `python benchmarks/forecasts.py`

Replay the runs of benchmarks/forecast_runs.py record by record, with the forecasts that a monitor and
`attnscale watch-log` would make at each record. Measure how often the 90% interval of a forecast contained the later
values, how often a healthy run had a forecast of a threshold that it did not pass in time, and how many diverging runs
had a correct forecast before their loss departed. Damping and widths were chosen on the first seeds; the figures of the
held-out seeds are printed too.
"""

import argparse
import json
import lzma
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from attnscale.diagnose import Finding
from attnscale.diagnose.alarm import Thresholds, next_threshold
from attnscale.diagnose.forecast import Crossing
from attnscale.train import LayerRecord, Record
from attnscale.train.history import WINDOW, History, Sample, trend

RESULTS = Path(__file__).parent / "results" / "forecast-runs.jsonl.xz"
TUNED, SET_ASIDE = (0, 1), (100, 101)  # seeds
BY_HEAD = ("max", "max_above_mean")
RENAMED = {"scale": "scale_applied"}  # recorded name: present name


@dataclass(frozen=True)
class Forecast:
    """A forecast that a layer will pass a threshold, and the step at which it passed."""

    step: int
    layer: str
    crossing: Crossing
    passed: float  # step of the first record at or above the threshold; inf: never

    reach: float  # steps ahead that the forecast covers

    @property
    def is_true(self) -> bool:
        """Return True if the run passed the threshold within the reach of the forecast."""
        return self.passed <= self.step + self.reach


@dataclass
class Replay:
    """A recorded run, and the forecasts at each of its records."""

    case: str
    seed: int
    departs: int | None
    records: list[Record]
    trained: bool
    predictions: list[Forecast] = field(default_factory=list)
    covered: list[tuple[float, bool]] = field(default_factory=list)  # samples ahead; contained?
    alarms: list[tuple[int, Finding]] = field(default_factory=list)

    @property
    def is_healthy(self) -> bool:
        """Return True if its loss did not depart."""
        return self.departs is None

    @cached_property
    def first_true(self) -> int | None:
        """Return the step of the first forecast that came true."""
        return min((each.step for each in self.predictions if each.is_true), default=None)

    @property
    def false_steps(self) -> set[int]:
        """Return the steps of forecasts that did not come true."""
        return {each.step for each in self.predictions if not each.is_true}


def read_runs(path: Path = RESULTS, seeds: Iterable[int] | None = None) -> Iterator[Replay]:
    """Yield the recorded runs, without forecasts."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            plain = json.loads(line)
            if seeds is None or plain["seed"] in seeds:
                yield Replay(plain["case"], plain["seed"], plain["departs"], list(records(plain)), plain["trained"])


def records(plain: dict[str, Any]) -> Iterator[Record]:
    """Yield the records of a run; some statistics were recorded with one number per layer only."""
    softcap = plain["settings"]["softcap"]
    for at, step in enumerate(plain["steps"]):
        layers = {}
        for name, columns in plain["layers"].items():
            numbers = {
                RENAMED.get(number, number): [math.nan if value is None else value for value in as_list(column[at])]
                for number, column in columns.items()
                if number not in ("broken", "clipped")
            }
            clipped = columns["clipped"][at] if "clipped" in columns else None
            layers[name] = LayerRecord(64, numbers, columns["broken"][at], softcap, clipped)
        yield Record(step, 0.0, layers)


def as_list(value: Any) -> list[Any]:
    """Return a list of one number per head, or of one for the whole layer."""
    return value if isinstance(value, list) else [value]


def replay(run: Replay) -> Replay:
    """Forecast at every record, and compare with the later records."""
    history = History(Thresholds(), run.trained)
    for record in run.records:
        run.alarms += [(record.step, alarm) for alarm in history.add(record.step, dict(record.layers))]
    for name in run.records[0].layers:
        samples = [Sample.of(record.step, record.layers[name]) for record in run.records if name in record.layers]
        for count in range(1, len(samples) + 1):
            _forecast(run, name, samples[:count], samples[count:])
    return run


def _forecast(run: Replay, name: str, known: Sequence[Sample], ahead: Sequence[Sample]) -> None:
    layer = run.records[len(known) - 1].layers[name]
    found, now = trend(known[-WINDOW:], layer.softcap), known[-1]
    growth = None if found.is_clipped else found.growth
    if growth is None:
        return
    crossing = found.passes(next_threshold(now.largest, layer.clipped is not None))
    if crossing is not None:
        passed = next((sample.step for sample in ahead if sample.largest >= crossing.threshold), math.inf)
        run.predictions.append(Forecast(now.step, name, crossing, passed, growth.horizon))
    for sample in ahead:
        steps = sample.step - now.step
        if steps > growth.horizon or not sample.largest > 0:
            break
        inside = growth.lowest(steps) <= math.log(sample.largest) <= growth.highest(steps)
        run.covered.append((steps / growth.spacing, inside))


def share(parts: Iterable[bool]) -> float:
    """Return the share of true values; NaN if there are no values."""
    found = list(parts)
    return sum(found) / len(found) if found else math.nan


def figures(runs: Sequence[Replay]) -> dict[str, float]:
    """Return the printed figures, which a test checks."""
    healthy = [run for run in runs if run.is_healthy]
    diverging = [run for run in runs if not run.is_healthy]
    samples = sum(len(run.records) for run in healthy)
    return {
        "healthy runs": len(healthy),
        "samples of healthy runs": samples,
        "samples with a false 'will pass'": sum(len(run.false_steps) for run in healthy),
        "false share": sum(len(run.false_steps) for run in healthy) / max(samples, 1),
        "coverage of 90% intervals": share(inside for run in runs for _, inside in run.covered),
        "coverage in healthy runs": share(inside for run in healthy for _, inside in run.covered),
        "coverage in diverging runs": share(inside for run in diverging for _, inside in run.covered),
        "forecasts that a threshold is passed": sum(len(run.predictions) for run in runs),
        "of these passed within reach": share(each.is_true for run in runs for each in run.predictions),
        "of these passed in the run": share(math.isfinite(each.passed) for run in runs for each in run.predictions),
        "of these not before the earliest": share(
            each.passed >= each.crossing.earliest for run in runs for each in run.predictions
        ),
        "diverging runs": len(diverging),
        "told before the loss departs": share(
            run.first_true is not None and run.departs is not None and run.first_true < run.departs for run in diverging
        ),
        "healthy runs with a warning": sum(any(alarm.severity != "note" for _, alarm in run.alarms) for run in healthy),
    }


def main() -> None:
    """Print the figures of the seeds used for tuning, and of the held-out seeds."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--runs", type=Path, default=RESULTS)
    arguments.add_argument("--each", action="store_true", help="Print every run too.")
    given = arguments.parse_args()
    for title, seeds in (("tuned on", TUNED), ("set aside", SET_ASIDE)):
        runs = [replay(run) for run in read_runs(given.runs, seeds)]
        print(f"seeds {title}: {', '.join(map(str, seeds))}")
        for run in runs if given.each else ():
            print(
                f"  {run.case}, seed {run.seed}: departs {run.departs}, told {run.first_true}, false at "
                f"{sorted(run.false_steps)}, coverage {share(inside for _, inside in run.covered):.2f}, alarms "
                f"{[(step, alarm.code, alarm.severity) for step, alarm in run.alarms]}"
            )
        for name, value in figures(runs).items():
            print(f"  {name}: {value if isinstance(value, int) else f'{value:.3f}'}")


if __name__ == "__main__":
    main()
