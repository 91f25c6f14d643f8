"""Expectations of softmax over Gaussian scores: against quadrature, simulation, limits and published values."""

import math
from itertools import pairwise

import numpy as np
import pytest

from attnscale.errors import SettingError
from attnscale.reference import row_statistics
from attnscale.theory import expected_softmax


@pytest.fixture(scope="module")
def quadrature():
    """Nodes and weights on [-1, 1], in forty pieces: 4,000 nodes at once take ten seconds to find."""
    pieces = 40
    nodes, weights = np.polynomial.legendre.leggauss(100)
    middles = (2 * np.arange(pieces) + 1) / pieces - 1
    return (middles[:, None] + nodes / pieces).ravel(), np.tile(weights / pieces, pieces)


@pytest.mark.parametrize("spread", [1e-3, 0.1, 1.0, 3.0, 8.0, 30.0])
def test_two_keys_equal_one_dimensional_quadrature(spread, quadrature):
    # p = sigmoid(δ), δ ~ N(0, 2σ²): an ordinary integral, folded at its kink
    nodes, weights = quadrature
    z = (nodes + 1) * 6.5
    density = weights * 6.5 * 2 * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    stats = row_statistics(np.stack([z * spread * math.sqrt(2), np.zeros_like(z)], axis=-1))
    expected = expected_softmax(spread, 2)
    assert expected.entropy == pytest.approx(density @ stats.entropy, abs=1e-9)
    assert expected.top1 == pytest.approx(density @ stats.top1, abs=1e-9)
    assert expected.jacobian_trace == pytest.approx(density @ stats.jacobian_trace, abs=1e-10)


@pytest.mark.parametrize(
    ("spread", "keys"), [(0.307, 1024), (1.0, 7), (2.0, 1024), (3.72, 1024), (8.0, 257), (22.6, 512)]
)
def test_expectations_match_simulation(spread, keys):
    rng = np.random.default_rng(keys)
    rows = 4000
    stats = row_statistics(rng.normal(size=(rows, keys)) * spread)
    expected = expected_softmax(spread, keys)
    for name in ("entropy", "top1", "jacobian_trace", "entropy_ratio"):
        sample = getattr(stats, name)
        error = 4.5 * sample.std() / math.sqrt(rows)
        assert abs(sample.mean() - getattr(expected, name)) <= error, name


def test_known_values_at_1024_keys():
    # entropy ratio, top-1: simulated by others over 400 rows
    for spread, ratio, top1 in [(1, 0.93, 0.016), (2, 0.73, 0.10), (3.72, 0.37, 0.40), (8, 0.13, 0.69)]:
        expected = expected_softmax(spread, 1024)
        assert expected.entropy_ratio == pytest.approx(ratio, abs=0.006)
        assert expected.top1 == pytest.approx(top1, abs=0.025)


def test_no_spread_is_uniform_and_small_spread_follows_the_expansion():
    uniform = expected_softmax(0.0, 11)
    assert (uniform.entropy, uniform.top1, uniform.jacobian_trace) == pytest.approx((math.log(11), 1 / 11, 10 / 11))
    tiny = expected_softmax(1e-3, 11)
    assert math.log(11) - tiny.entropy == pytest.approx(1e-6 / 2 * (1 - 1 / 11), rel=1e-4)


def test_far_below_the_critical_spread_the_asymptotes_hold():
    expected = expected_softmax(1.0, 10**6)
    assert expected.entropy == pytest.approx(math.log(10**6) - 0.5, abs=1e-4)
    assert 1 - expected.jacobian_trace == pytest.approx(math.e / 10**6, rel=1e-4)


def test_far_above_the_critical_spread_one_key_takes_everything():
    frozen = expected_softmax(1000.0, 100)
    assert frozen.top1 > 0.995
    assert frozen.jacobian_trace < 0.01
    assert 0 <= frozen.entropy < 0.01


def test_quantities_are_monotone_in_the_spread():
    grid = [expected_softmax(s, 100) for s in np.linspace(0, 12, 25)]
    assert all(a.entropy > b.entropy and a.jacobian_trace > b.jacobian_trace for a, b in pairwise(grid))
    assert all(a.top1 < b.top1 for a, b in pairwise(grid))


def test_both_ways_of_summing_agree_where_one_takes_over_from_the_other():
    below, above = expected_softmax(0.5 - 1e-9, 300), expected_softmax(0.5 + 1e-9, 300)
    for name in ("entropy", "top1", "jacobian_trace"):
        assert getattr(below, name) == pytest.approx(getattr(above, name), rel=1e-7)


def test_past_critical_spread_what_is_left_falls_as_one_over_the_spread_however_wide():
    near, far, absurd = (expected_softmax(spread, 1024) for spread in (1e3, 2e3, 1e9))
    for name in ("entropy", "jacobian_trace"):
        assert getattr(far, name) == pytest.approx(getattr(near, name) / 2, rel=2e-3)
        assert getattr(absurd, name) == pytest.approx(getattr(far, name) * 2e3 / 1e9, rel=1e-9)


@pytest.mark.parametrize(("spread", "keys"), [(1.0, 1), (-1.0, 8), (math.nan, 8), (math.inf, 8)])
def test_settings_without_a_meaning_are_refused(spread, keys):
    with pytest.raises(SettingError, match="at least 2 keys and a finite spread"):
        expected_softmax(spread, keys)
