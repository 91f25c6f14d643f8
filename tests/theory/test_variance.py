"""The variance law by Monte Carlo, inside the interval that the sample size gives; and limits of softmax."""

import math

import numpy as np
import pytest

from attnscale.errors import SettingError
from attnscale.reference import row_statistics, softmax
from attnscale.theory import (
    critical_spread,
    entropy_floor,
    regime,
    row_variance,
    saturation_point,
    score_mean,
    score_variance,
    unit_variance_scale,
)

SAMPLES = 20_000
Z = 4.5  # one false alarm in 150,000 checks

DRAW = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "uniform": lambda rng, shape: rng.uniform(-math.sqrt(3), math.sqrt(3), shape),
    "sign": lambda rng, shape: rng.choice([-1.0, 1.0], shape),
}


def assert_variance(scores, expected):
    """The sample variance lies within Z standard errors, from the sample's own fourth moment, of the expected one."""
    centred = scores - scores.mean()
    variance = (centred**2).mean()
    # ± 1 components at d = 1 leave a fourth moment of exactly variance²: only rounding is left
    error = math.sqrt(max((centred**4).mean() - variance**2, 0) / scores.size)
    error += 1e-3 * expected / math.sqrt(scores.size)
    assert abs(variance - expected) <= Z * error, f"variance {variance:.5g}, expected {expected:.5g} ± {Z * error:.2g}"


@pytest.mark.parametrize("distribution", DRAW)
@pytest.mark.parametrize("head_dim", [1, 2, 3, 8, 64, 127, 512, 4096])
def test_variance_of_a_score_is_d_k_for_unit_components(head_dim, distribution):
    rng, draw = np.random.default_rng(head_dim), DRAW[distribution]
    pairs = [(draw(rng, (1000, head_dim)), draw(rng, (1000, head_dim))) for _ in range(SAMPLES // 1000)]
    assert score_variance(head_dim) == head_dim
    assert_variance(np.concatenate([(query * key).sum(-1) for query, key in pairs]), head_dim)


@pytest.mark.parametrize(
    ("query", "key"), [((0.5, 2.0), (-1.0, 0.3)), ((3.0, 0.1), (0.0, 1.0)), ((0.0, 1.7), (2.0, 0.5))]
)
def test_variance_of_a_score_with_means_and_spreads(query, key):
    rng, head_dim = np.random.default_rng(7), 13
    q = rng.normal(query[0], math.sqrt(query[1]), (SAMPLES, head_dim))
    k = rng.normal(key[0], math.sqrt(key[1]), (SAMPLES, head_dim))
    scores = (q * k).sum(-1)
    expected = score_variance(head_dim, *query, *key)
    assert_variance(scores, expected)
    assert abs(scores.mean() - score_mean(head_dim, query[0], key[0])) <= Z * math.sqrt(expected / SAMPLES)


def test_row_variance_leaves_out_what_every_key_shares():
    rng, head_dim, keys = np.random.default_rng(8), 17, 50
    q = rng.normal(0.7, 1.3, (4000, 1, head_dim))
    k = rng.normal(2.0, 0.6, (4000, keys, head_dim))
    within = (q * k).sum(-1).var(-1, ddof=1)
    expected = row_variance(head_dim, 0.7, 1.3**2, 0.6**2)
    assert abs(within.mean() - expected) <= Z * within.std() / math.sqrt(within.size)
    assert expected < score_variance(head_dim, 0.7, 1.3**2, 2.0, 0.6**2) / 2


def test_unit_variance_scale_is_one_over_sqrt_d_k_for_unit_components():
    assert unit_variance_scale(score_variance(64)) == 0.125
    with pytest.raises(SettingError, match="positive, finite variance"):
        unit_variance_scale(0.0)


# Limits


def test_critical_spread_and_regimes_depend_on_the_keys():
    assert critical_spread(1024) == pytest.approx(3.723, abs=1e-3)
    assert critical_spread(1) == 0.0
    found = [regime(spread, 1024) for spread in (0.125, 0.307, 1.0, 2.5, 3.72, 8.0)]
    assert found == ["diluted", "healthy", "healthy", "healthy", "sharp", "sharp"]
    assert regime(2.5, 8) == "sharp"


@pytest.mark.parametrize("keys", [2, 4, 100])
@pytest.mark.parametrize("weight", [0.5, 0.9, 0.99])
def test_softmax_reaches_the_weight_at_its_saturation_point(keys, weight):
    assert softmax([saturation_point(keys, weight)] + [0.0] * (keys - 1))[0] == pytest.approx(weight)
    with pytest.raises(SettingError, match="at least 2 keys"):
        saturation_point(1)


def test_the_entropy_floor_is_reached_by_its_extremal_row_and_never_passed():
    # a zero-mean row of norm σ with one score up and the others equal meets the bound
    keys, bound = 9, 3.0
    up = bound * math.sqrt((keys - 1) / keys)
    extremal = np.array([up] + [-up / (keys - 1)] * (keys - 1))
    assert np.linalg.norm(extremal) == pytest.approx(bound)
    assert row_statistics(extremal).entropy == pytest.approx(entropy_floor(bound, keys))
    rows = np.random.default_rng(0).normal(size=(5000, keys))
    rows *= bound / np.linalg.norm(rows, axis=-1, keepdims=True)
    assert row_statistics(rows).entropy.min() >= entropy_floor(bound, keys)
    assert entropy_floor(0.0, 9) == pytest.approx(math.log(9))
    assert entropy_floor(200.0, 9) == pytest.approx(0.0, abs=1e-9)
    assert entropy_floor(5.0, 1) == 0.0
