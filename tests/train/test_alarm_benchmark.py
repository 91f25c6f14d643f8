"""benchmarks/alarms.py: the alarm comes before the loss departs, and healthy runs raise none."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from attnscale.models import default_text, encode

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "scores-explode.md"


@pytest.fixture(scope="module")
def benchmark():
    before = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("alarms")
    sys.path[:] = before[0]
    for name in set(sys.modules) - before[1]:
        if name in ("alarms", "divergence", "forecast_runs"):
            del sys.modules[name]


def test_the_recorded_runs_have_their_alarm_in_time_and_the_guide_shows_them(benchmark):
    found = json.loads(benchmark.RESULTS.read_text(encoding="utf-8"))
    assert {(run["run"], run["seed"]) for run in found["bad"]} == {
        (bug.name, seed) for bug in benchmark.BUGS for seed in benchmark.SEEDS
    }
    assert sum(map(benchmark.is_in_time, found["bad"])) >= 17
    assert len(found["healthy"]) == 24
    assert not any(run["alarms"] for run in found["healthy"])
    assert benchmark.table(found) in GUIDE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_an_alarm_comes_before_the_loss_departs(benchmark):
    text = encode(default_text())
    bug = next(bug for bug in benchmark.BUGS if bug.name == "learning rate 0.3")
    reference, _ = benchmark.train(bug.reference, 3, text)  # a seed that was not recorded
    curve, alarms = benchmark.train(bug.case, 3, text, bug.spoil)
    assert benchmark.is_in_time(benchmark.result(bug.name, 3, alarms, benchmark.departure(curve, reference)))
