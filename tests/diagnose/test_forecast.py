"""Forecasts follow growth a little way, do not extend growth that bends, and say nothing of what is far off."""

import math
import runpy
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from attnscale.diagnose import Trend, growth
from attnscale.diagnose.forecast import DAMPING, FARTHEST

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "forecasts.py"))
STEPS = np.arange(0, 1000, 50)
VALUES = 5.0 * np.exp(0.005 * STEPS)
GROWING = growth(STEPS, VALUES)  # at 577


def test_the_growth_of_the_latest_samples_goes_on_and_is_damped():
    assert GROWING.rate == pytest.approx(0.005)
    assert GROWING.likely(0) == pytest.approx(math.log(5) + 0.005 * 950)
    assert GROWING.likely(50) - GROWING.likely(0) == pytest.approx(DAMPING * 0.25)
    assert GROWING.likely(100) - GROWING.likely(50) == pytest.approx(DAMPING**2 * 0.25)
    crossing = GROWING.passes(1e3)
    assert GROWING.likely(crossing.step - 950) == pytest.approx(math.log(1e3))
    assert 950 < crossing.earliest < crossing.step


def test_a_forecast_goes_no_farther_than_half_the_samples_nor_than_eight():
    assert GROWING.horizon == FARTHEST * 50
    assert growth(STEPS[:7], VALUES[:7]).horizon == 3 * 50
    for steps in (50, 200, 400):
        assert GROWING.lowest(steps) < GROWING.level < GROWING.likely(steps) < GROWING.highest(steps)


@pytest.mark.parametrize("values", [[1.0] * 3, [math.nan] * 20, [-1.0] * 20, []])
def test_too_few_samples_give_no_growth(values):
    assert growth(range(len(values)), values) is None


BENDING = 60.0 - 55.0 * np.exp(-np.arange(32) / 8)  # an exponential through all samples passes 100 soon


@pytest.mark.parametrize(
    ("steps", "values"),
    [
        (STEPS, 0.2 * np.exp(0.0007 * STEPS)),  # far below
        (np.arange(10), np.exp(np.arange(10))),  # has passed it
        (np.arange(10), 90.0 * np.exp(-0.1 * np.arange(10))),
        (np.arange(10), np.full(10, 99.0)),
        *((50 * np.arange(count), BENDING[:count]) for count in range(4, 33, 4)),
    ],
)
def test_values_far_below_past_the_threshold_or_not_growing_have_no_crossing(steps, values):
    assert growth(steps, values).passes(100.0) is None


def test_the_latest_samples_decide_and_a_wild_one_does_not():
    steps = np.arange(0, 200, 5)
    sudden = np.where(steps < 170, 6.0, 6.0 * np.exp(0.12 * (steps - 170)))
    assert any(growth(steps[:count], sudden[:count]).passes(100.0) for count in range(36, 41))
    steps = np.arange(0, 320, 10)
    back = 3.0 * np.exp(0.02 * np.minimum(steps, 240) - 0.01 * np.maximum(steps - 240, 0))
    assert growth(steps[:24], back[:24]).is_growing
    assert growth(steps[:24], back[:24]).factor == pytest.approx(math.exp(0.02 * 70))
    assert not growth(steps, back).is_growing
    wild = VALUES * np.where(STEPS[-3] == STEPS, 50, 1)
    assert growth(STEPS, wild).passes(1e3).step == pytest.approx(GROWING.passes(1e3).step, abs=15)


@pytest.mark.parametrize(
    ("limits", "passes"),
    [
        ({}, True),
        ({"softcap": 5000.0}, True),
        ({"softcap": 50.0}, False),
        ({"is_clipped": True}, False),
        ({"bounds": 2 * VALUES}, True),  # of norms that grow with the scores
        ({"bounds": (600.0,) * len(STEPS)}, False),  # of normalised queries and keys, whose gains hardly move
    ],
)
def test_a_soft_cap_a_clip_and_a_bound_stop_growth(limits, passes):
    trend = Trend(STEPS, VALUES, limits.pop("bounds", ()), **limits)
    assert trend.passes(1e3) == (GROWING.passes(1e3) if passes else None)
    assert trend.passes(None) is None


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_runs_that_do_not_diverge_are_seldom_called_growing(correlation):
    generator = np.random.default_rng(2)
    steps, growing, runs = np.arange(0, 1600, 50), 0, 300
    for _ in range(runs):
        noise = generator.standard_normal(len(steps))
        for at in range(1, len(steps)):
            noise[at] = correlation * noise[at - 1] + math.sqrt(1 - correlation**2) * noise[at]
        growing += growth(steps, 20.0 * np.exp(0.2 * noise)).is_growing
    assert growing / runs <= 0.10


@pytest.mark.parametrize("seeds", ["TUNED", "SET_ASIDE"])
def test_forecasts_and_alarms_of_recorded_runs_come_true(seeds):
    runs = [BENCHMARK["replay"](run) for run in BENCHMARK["read_runs"](seeds=BENCHMARK[seeds])]
    assert set(Counter(run.case for run in runs).values()) == {2}
    found = BENCHMARK["figures"](runs)
    assert found["healthy runs"] >= 60
    assert found["diverging runs"] >= 12
    assert 0.85 <= found["coverage of 90% intervals"] <= 0.95
    assert found["false share"] < 0.02
    assert found["told before the loss departs"] >= 0.8
    for run in runs:
        raised = [(step, alarm.layer, alarm.code) for step, alarm in run.alarms]
        assert len(set(raised)) == len(raised), run.case
        assert not any(step == 0 for step, _ in run.alarms), run.case
        largest = max(layer.whole("max") for each in run.records for layer in each.layers.values())
        warned = [alarm for _, alarm in run.alarms if alarm.code == "exploding" and alarm.severity != "note"]
        assert not (run.is_healthy and largest < 100 and warned), run.case
