"""Critical spread, entropy floor, saturation point, regimes."""

import math

import numpy as np
import pytest

from attnscale.errors import SettingError
from attnscale.reference import row_statistics, softmax
from attnscale.theory import critical_spread, entropy_floor, regime, saturation_point


def test_critical_spread_of_1024_keys():
    assert critical_spread(1024) == pytest.approx(3.723, abs=1e-3)
    assert critical_spread(1) == 0.0


@pytest.mark.parametrize("keys", [2, 4, 100])
def test_softmax_reaches_the_weight_at_its_saturation_point(keys):
    for weight in (0.5, 0.9, 0.99):
        x = saturation_point(keys, weight)
        assert softmax([x] + [0.0] * (keys - 1))[0] == pytest.approx(weight)


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


def test_the_entropy_floor_starts_at_ln_n_and_falls_to_zero():
    assert entropy_floor(0.0, 9) == pytest.approx(math.log(9))
    assert entropy_floor(200.0, 9) == pytest.approx(0.0, abs=1e-9)
    assert entropy_floor(5.0, 1) == 0.0


def test_the_regime_depends_on_spread_and_keys():
    assert [regime(s, 1024) for s in (0.125, 0.307, 1.0, 2.5, 3.72, 8.0)] == [
        "diluted", "healthy", "healthy", "healthy", "sharp", "sharp",
    ]  # fmt: skip
    assert regime(2.5, 8) == "sharp"


@pytest.mark.parametrize("keys", [0, 1])
def test_a_single_key_has_no_saturation_point(keys):
    with pytest.raises(SettingError, match="at least 2 keys"):
        saturation_point(keys)
