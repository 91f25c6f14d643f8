"""Expectations of softmax over Gaussian scores: against quadrature, simulation and limits."""

import math
from itertools import pairwise

import numpy as np
import pytest

from attnscale.errors import SettingError
from attnscale.reference import row_statistics
from attnscale.theory import expected_row, expected_softmax

ROW = ("entropy", "jacobian_trace", "jacobian_norm2")
SOFTMAX = ("entropy", "top1", "jacobian_trace", "entropy_ratio")


def assert_means(statistics, expected, names, errors=4.5):
    """The sample means lie within 4.5 standard errors of the expectations."""
    for name in names:
        sample = getattr(statistics, name)
        error = errors * sample.std() / math.sqrt(sample.size)
        assert abs(sample.mean() - getattr(expected, name)) <= error + 1e-9, name


@pytest.mark.parametrize("spread", [1e-3, 0.1, 1.0, 3.0, 8.0, 30.0])
def test_two_keys_equal_one_dimensional_quadrature(spread):
    # p = sigmoid(δ), δ ~ N(0, 2σ²): an ordinary integral, folded at its kink, in forty pieces
    nodes, weights = np.polynomial.legendre.leggauss(100)
    z = ((np.arange(40)[:, None] + (nodes + 1) / 2) * 13 / 40).ravel()
    density = np.tile(weights / 2 * 13 / 40, 40) * 2 * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    stats = row_statistics(np.stack([z * spread * math.sqrt(2), np.zeros_like(z)], axis=-1))
    expected = expected_softmax(spread, 2)
    assert expected.entropy == pytest.approx(density @ stats.entropy, abs=1e-9)
    assert expected.top1 == pytest.approx(density @ stats.top1, abs=1e-9)
    assert expected.jacobian_trace == pytest.approx(density @ stats.jacobian_trace, abs=1e-10)
    assert expected_row(spread, 2).jacobian_norm2 == pytest.approx(density @ stats.jacobian_norm2, abs=1e-10)


@pytest.mark.parametrize(
    ("spread", "keys"),
    [(0.1, 7), (0.307, 1024), (1.0, 7), (2.0, 1024), (3.72, 1024), (8.0, 5), (8.0, 257), (22.6, 512)],
)
def test_expectations_match_simulation(spread, keys):
    stats = row_statistics(np.random.default_rng(keys).normal(size=(4000, keys)) * spread)
    assert_means(stats, expected_softmax(spread, keys), SOFTMAX)
    assert_means(stats, expected_row(spread, keys), ROW)


@pytest.mark.parametrize(("spread", "keys", "head_dim"), [(1.0, 61, 1), (4.0, 61, 2), (8.0, 31, 13), (2.0, 31, 64)])
def test_queries_of_few_components_are_averaged_over_their_lengths(spread, keys, head_dim):
    draw = np.random.default_rng(1)
    query, key = draw.normal(size=(8_000, 1, head_dim)), draw.normal(size=(8_000, keys, head_dim))
    stats = row_statistics((query @ key.swapaxes(1, 2))[:, 0] * spread / math.sqrt(head_dim))
    assert_means(stats, expected_row(spread, keys, head_dim), ROW)
    if head_dim < 3:  # a spread of one number would be seen to be wrong
        with pytest.raises(AssertionError):
            assert_means(stats, expected_row(spread, keys), ROW)


@pytest.mark.parametrize("spread", [1e-9, 0.3, 2.0, 5e3])
def test_a_row_is_that_of_expected_softmax_and_of_wide_heads(spread):
    row, softmax, wide = expected_row(spread, 29), expected_softmax(spread, 29), expected_row(spread, 29, 10**8)
    assert row.entropy == pytest.approx(softmax.entropy, rel=1e-12)
    assert row.jacobian_trace == pytest.approx(softmax.jacobian_trace, rel=1e-12)
    assert [getattr(wide, name) for name in ROW] == pytest.approx([getattr(row, name) for name in ROW], rel=1e-5)


def test_no_spread_is_uniform_and_small_spread_follows_the_expansion():
    uniform, tiny = expected_softmax(0.0, 11), expected_softmax(1e-3, 11)
    assert (uniform.entropy, uniform.top1, uniform.jacobian_trace) == pytest.approx((math.log(11), 1 / 11, 10 / 11))
    assert math.log(11) - tiny.entropy == pytest.approx(1e-6 / 2 * (1 - 1 / 11), rel=1e-4)
    assert expected_row(0.0, 11).jacobian_norm2 == pytest.approx(10 / 121)
    assert expected_row(1e-4, 11).jacobian_norm2 == pytest.approx(10 / 121, rel=1e-6)


def test_far_below_the_critical_spread_the_asymptotes_hold():
    expected = expected_softmax(1.0, 10**6)
    assert expected.entropy == pytest.approx(math.log(10**6) - 0.5, abs=1e-4)
    assert 1 - expected.jacobian_trace == pytest.approx(math.e / 10**6, rel=1e-4)


def test_quantities_are_monotone_and_both_ways_of_summing_agree_where_one_takes_over():
    grid = [expected_softmax(s, 100) for s in np.linspace(0, 12, 25)]
    assert all(a.entropy > b.entropy and a.jacobian_trace > b.jacobian_trace for a, b in pairwise(grid))
    assert all(a.top1 < b.top1 for a, b in pairwise(grid))
    below, above = expected_softmax(0.5 - 1e-9, 300), expected_softmax(0.5 + 1e-9, 300)
    for name in SOFTMAX:
        assert getattr(below, name) == pytest.approx(getattr(above, name), rel=1e-7)


def test_past_the_critical_spread_entropy_and_gradient_fall_as_one_over_the_spread():
    near, far, absurd = (expected_softmax(spread, 1024) for spread in (1e3, 2e3, 1e9))
    for name in ("entropy", "jacobian_trace"):
        assert getattr(far, name) == pytest.approx(getattr(near, name) / 2, rel=2e-3)
        assert getattr(absurd, name) == pytest.approx(getattr(far, name) * 2e3 / 1e9, rel=1e-9)
    assert absurd.top1 == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("amiss", [{"keys": 1}, {"spread": -1.0}, {"spread": math.nan}, {"spread": math.inf}])
def test_settings_without_a_meaning_are_refused(amiss):
    for expected in (expected_softmax, expected_row):
        with pytest.raises(SettingError, match="at least 2 keys"):
            expected(**{"spread": 1.0, "keys": 7, **amiss})
    with pytest.raises(SettingError, match="positive head_dim"):
        expected_row(1.0, 7, head_dim=0)
