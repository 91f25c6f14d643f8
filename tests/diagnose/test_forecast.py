"""Forecasts: growth that goes on is followed a little way, growth that bends is not drawn out, far off is silence."""

import math

import numpy as np
import pytest

from attnscale.diagnose import Trend, growth
from attnscale.diagnose.forecast import DAMPING, FARTHEST

STEPS = np.arange(0, 1000, 50)
GROWING = growth(STEPS, 5.0 * np.exp(0.005 * STEPS))  # at 577


def test_the_growth_of_the_latest_samples_goes_on_and_is_damped():
    assert GROWING.rate == pytest.approx(0.005)
    assert GROWING.likely(0) == pytest.approx(math.log(5) + 0.005 * 950)
    assert GROWING.likely(50) - GROWING.likely(0) == pytest.approx(DAMPING * 0.25)
    assert GROWING.likely(100) - GROWING.likely(50) == pytest.approx(DAMPING**2 * 0.25)
    crossing = GROWING.passes(1e3)
    assert GROWING.likely(crossing.step - 950) == pytest.approx(math.log(1e3))
    assert 950 < crossing.earliest < crossing.step


def test_nothing_is_said_of_more_samples_ahead_than_half_of_those_seen_nor_than_eight():
    assert GROWING.horizon == FARTHEST * 50
    assert growth(STEPS[:7], np.exp(0.005 * STEPS[:7])).horizon == 3 * 50
    for steps in (50, 200, 400):
        assert GROWING.lowest(steps) < GROWING.level < GROWING.likely(steps) < GROWING.highest(steps)


@pytest.mark.parametrize("values", [[1.0] * 3, [math.nan] * 20, [-1.0] * 20, []])
def test_too_little_to_tell_is_none(values):
    assert growth(range(len(values)), values) is None


@pytest.mark.parametrize(
    ("steps", "values"),
    [
        (STEPS, 0.2 * np.exp(0.0007 * STEPS)),  # a largest score of 0.40 was to be the first to pass 100
        (STEPS, 5.0 * np.exp(0.001 * STEPS)),
        (np.arange(10), np.exp(np.arange(10))),  # has passed it
        (np.arange(10), 90.0 * np.exp(-0.1 * np.arange(10))),
        (np.arange(10), np.full(10, 99.0)),
    ],
)
def test_what_is_far_below_has_passed_or_does_not_grow_passes_nothing(steps, values):
    assert growth(steps, values).passes(100.0) is None


def test_growth_that_bends_is_not_drawn_out():
    """From 5 towards 60, half of it in the first quarter: an exponential through all samples passes 100 soon."""
    steps = np.arange(0, 1600, 50)
    values = 60.0 - 55.0 * np.exp(-steps / 400.0)
    for count in range(4, len(steps) + 1):
        assert growth(steps[:count], values[:count]).passes(100.0) is None


def test_a_sudden_growth_is_seen_after_a_long_calm():
    steps = np.arange(0, 200, 5)
    values = np.where(steps < 170, 6.0, 6.0 * np.exp(0.12 * (steps - 170)))
    crossings = [growth(steps[:count], values[:count]).passes(100.0) for count in range(36, 41)]
    assert any(crossing is not None for crossing in crossings)


def test_a_wild_sample_does_not_move_it():
    values = 5.0 * np.exp(0.005 * STEPS)
    wild = values.copy()
    wild[-3] *= 50
    assert growth(STEPS, wild).passes(1e3).step == pytest.approx(GROWING.passes(1e3).step, abs=15)


GROWN = tuple(5.0 * np.exp(0.005 * STEPS))


@pytest.mark.parametrize(
    ("limits", "passes"),
    [
        ({}, True),
        ({"softcap": 5000.0}, True),
        ({"softcap": 50.0}, False),
        ({"is_clipped": True}, False),
        ({"bounds": tuple(10.0 * np.exp(0.005 * STEPS))}, True),  # of norms that grow with the scores
        ({"bounds": (600.0,) * len(STEPS)}, False),  # of normalised queries and keys, whose gains hardly move
    ],
)
def test_a_soft_cap_a_clip_and_a_bound_stop_growth(limits, passes):
    trend = Trend(STEPS, GROWN, limits.pop("bounds", ()), **limits)
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


def test_growth_is_that_of_the_latest_samples():
    """A run that diverged and came back: most of its samples rise, its last ones fall."""
    steps = np.arange(0, 320, 10)
    values = 3.0 * np.exp(0.02 * np.minimum(steps, 240) - 0.01 * np.maximum(steps - 240, 0))
    assert growth(steps[:24], values[:24]).is_growing
    assert growth(steps[:24], values[:24]).factor == pytest.approx(math.exp(0.02 * 70))
    assert not growth(steps, values).is_growing
