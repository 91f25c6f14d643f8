"""benchmarks/alarms.py and benchmarks/divergence.py: alarms come before the loss departs, and QKClip prevents NaN."""

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
    """Import a benchmark by its name."""
    before = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module
    sys.path[:] = before[0]
    for name in set(sys.modules) - before[1]:
        if name in ("alarms", "divergence", "forecast_runs"):
            del sys.modules[name]


def test_the_recorded_runs_have_their_alarm_in_time_and_the_guide_shows_them(benchmark):
    alarms = benchmark("alarms")
    found = json.loads(alarms.RESULTS.read_text(encoding="utf-8"))
    assert {(run["run"], run["seed"]) for run in found["bad"]} == {
        (bug.name, seed) for bug in alarms.BUGS for seed in alarms.SEEDS
    }
    assert sum(map(alarms.is_in_time, found["bad"])) >= 17
    assert len(found["healthy"]) == 24
    assert not any(run["alarms"] for run in found["healthy"])
    assert alarms.table(found) in GUIDE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_an_alarm_comes_before_the_loss_departs(benchmark):
    alarms, text = benchmark("alarms"), encode(default_text())
    bug = next(bug for bug in alarms.BUGS if bug.name == "learning rate 0.3")
    reference, _ = alarms.train(bug.reference, 3, text)  # a seed that was not recorded
    curve, raised = alarms.train(bug.case, 3, text, bug.spoil)
    assert alarms.is_in_time(alarms.result(bug.name, 3, raised, alarms.departure(curve, reference)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what its compiler imports
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_half_precision_scores_stay_finite_with_qk_clip_compiled(benchmark):
    divergence, text = benchmark("divergence"), encode(default_text())
    plain = divergence.train("none", 0.3, 0, 100, text, "float16")
    assert not plain["finite"]
    clipped = divergence.train("QK-Clip 100", 0.3, 0, plain["steps"] + 5, text, "float16", "aot_eager")
    assert (clipped["finite"], clipped["steps"]) == (True, plain["steps"] + 5)
    assert clipped["clipped_inside"] is True  # though attention is written out there
