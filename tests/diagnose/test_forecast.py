"""Growth and forecast: exact on exact growth, robust to wild samples, honest on runs that do not diverge."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from attnscale.diagnose import growth
from attnscale.diagnose.forecast import Ceiling


def test_exponential_growth_is_found_exactly():
    steps = np.arange(0, 1000, 50)
    found = growth(steps, 3.0 * np.exp(0.004 * steps))
    assert found.rate == pytest.approx(0.004, rel=1e-9)
    assert found.low == pytest.approx(found.high)
    crossing = found.passes(1e3)
    assert crossing.step == pytest.approx(math.log(1e3 / 3) / 0.004)
    assert crossing.earliest == pytest.approx(crossing.latest)
    assert found.factor(1000) == pytest.approx(math.exp(4))


def test_a_quarter_of_wild_samples_does_not_move_it():
    generator = np.random.default_rng(0)
    steps = np.arange(0, 1600, 50)
    values = 3.0 * np.exp(0.004 * steps + 0.02 * generator.standard_normal(len(steps)))
    values[generator.choice(len(steps), 8, replace=False)] *= 50
    assert growth(steps, values).rate == pytest.approx(0.004, rel=0.2)


@pytest.mark.parametrize("values", [[1.0] * 5, [math.nan] * 20, [-1.0] * 20, []])
def test_too_little_to_tell_is_none(values):
    assert growth(range(len(values)), values) is None


def test_what_has_passed_or_does_not_grow_passes_nothing():
    steps = np.arange(10)
    assert growth(steps, np.exp(steps)).passes(100.0) is None
    assert growth(steps, np.exp(-0.1 * steps)).passes(100.0) is None
    assert growth(steps, np.ones(10)).passes(100.0) is None


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_intervals_cover_the_crossing_of_runs_that_diverge(correlation):
    """Log-linear growth with noise: 90% intervals, asked for at a time when the threshold is still ahead."""
    generator = np.random.default_rng(1)
    steps, rate, covered, runs = np.arange(0, 1600, 50), 0.002, 0, 300
    for _ in range(runs):
        noise = generator.standard_normal(len(steps))
        for at in range(1, len(steps)):
            noise[at] = correlation * noise[at - 1] + math.sqrt(1 - correlation**2) * noise[at]
        crossing = growth(steps, 5.0 * np.exp(rate * steps + 0.15 * noise)).passes(1e3)
        covered += crossing.earliest <= math.log(1e3 / 5.0) / rate <= crossing.latest
    assert covered / runs >= 0.88


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


def test_growth_that_levels_off_is_no_longer_called_growing_once_it_has():
    steps = np.arange(0, 5000, 50)
    values = 30.0 - 25.0 * np.exp(-steps / 300.0)
    late = growth(steps[-32:], values[-32:])
    assert late.factor(1000) == pytest.approx(1.0, abs=0.01)


STEPS = np.arange(0, 1000, 50)
GROWING = growth(STEPS, 5.0 * np.exp(0.004 * STEPS))


def test_a_soft_cap_is_never_passed():
    crossing = GROWING.passes(1e3)
    assert not Ceiling(softcap=50.0).allows(crossing)
    assert Ceiling(softcap=5000.0).allows(crossing)


def test_scores_that_grow_towards_a_bound_that_does_not_will_not_pass_it():
    crossing = GROWING.passes(1e3)
    flat = growth(STEPS, np.full(len(STEPS), 300.0))  # as of normalised queries and keys, whose gains hardly move
    assert not Ceiling(bound=flat).allows(crossing)
    along = growth(STEPS, 10.0 * np.exp(0.004 * STEPS))  # as of norms that grow with the scores
    assert Ceiling(bound=along).allows(crossing)


RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "divergence-float16.json"


def forecasts(run, threshold=1e3):
    """Of a recorded training run, at every sample before it passes a threshold: those an alarm would be raised by."""
    series = [(step, value) for step, value in run["largest"] if value is not None]
    passed = next((step for step, value in series if value >= threshold), math.inf)
    found = []
    for count in range(6, len(series) + 1):
        known = series[max(0, count - 32) : count]
        if known[-1][0] < passed:
            fitted = growth(*zip(*known, strict=True))
            crossing = fitted.passes(threshold) if fitted.is_growing else None
            if crossing is not None and crossing.step - fitted.step <= fitted.span:
                found.append((known[-1][0], crossing))
    return passed, found


def runs(rate, fixes):
    plain = json.loads(RECORDED.read_text())["runs"]
    return [run for run in plain if run["rate"] == rate and run["fix"] in fixes]


def test_recorded_runs_that_diverged_were_forecast_before_they_passed_the_threshold():
    leads = []
    for run in runs(0.3, ["none"]):
        assert not run["finite"]
        passed, found = forecasts(run)
        assert found, run["seed"]
        leads.append(passed - found[0][0])
    assert len(leads) == 3
    assert min(leads) >= 5


def test_recorded_runs_that_did_well_were_never_forecast_to_diverge():
    healthy = runs(0.003, ["none", "QK-norm", "soft-cap 50", "QK-Clip 100"])
    assert len(healthy) == 12
    for run in healthy:
        assert run["finite"]
        assert forecasts(run) == (math.inf, [])
