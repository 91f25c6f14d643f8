"""Growth: exact on exact growth, robust to wild samples, honest on runs that do not diverge."""

import math

import numpy as np
import pytest

from attnscale.diagnose import growth


def test_exponential_growth_is_found_exactly():
    steps = np.arange(0, 1000, 50)
    found = growth(steps, 3.0 * np.exp(0.004 * steps))
    assert found.rate == pytest.approx(0.004, rel=1e-9)
    assert found.low == pytest.approx(found.high)
    assert found.recent_rate == pytest.approx(0.004, rel=1e-9)
    assert found.factor(500) == pytest.approx(math.exp(2))


def test_a_quarter_of_wild_samples_does_not_move_it():
    generator = np.random.default_rng(0)
    steps = np.arange(0, 1600, 50)
    values = 3.0 * np.exp(0.004 * steps + 0.02 * generator.standard_normal(len(steps)))
    values[generator.choice(len(steps), 8, replace=False)] *= 50
    assert growth(steps, values).rate == pytest.approx(0.004, rel=0.2)


@pytest.mark.parametrize("values", [[1.0] * 5, [math.nan] * 20, [-1.0] * 20, []])
def test_too_little_to_tell_is_none(values):
    assert growth(range(len(values)), values) is None


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
    assert late.grown == pytest.approx(1.0, abs=0.01)


def test_no_factor_is_told_over_more_steps_than_were_seen():
    """A growth of half a step, seen for ten, was told as 2.63e+24-fold in 1,000."""
    steps = np.arange(0, 60, 5)
    found = growth(steps, 3.0 * np.exp(0.0586 * steps))
    assert found.factor(1000) == found.factor(55) == found.grown == pytest.approx(math.exp(0.0586 * 55))


def test_what_falls_at_last_is_not_growing_however_it_grew_before():
    """A run that diverged and came back: most of its samples rise, its last ones fall."""
    steps = np.arange(0, 320, 10)
    rising = 3.0 * np.exp(0.02 * np.minimum(steps, 270) - 0.01 * np.maximum(steps - 270, 0))
    found = growth(steps, rising)
    assert found.low > 0
    assert not found.is_growing
    assert growth(steps[:24], rising[:24]).is_growing
