import math

import numpy as np
import pytest

from attnscale.errors import SettingError
from attnscale.reference import row_statistics
from attnscale.theory import expected_row, expected_softmax

NAMES = ("entropy", "jacobian_trace", "jacobian_norm2")


def within_standard_errors(expected, statistics, errors=4.0):
    for name in NAMES:
        sample = getattr(statistics, name)
        error = sample.std() / math.sqrt(sample.size)
        assert abs(sample.mean() - getattr(expected, name)) < errors * error + 1e-9, name


@pytest.mark.parametrize(("spread", "keys"), [(0.1, 7), (1.0, 61), (3.0, 61), (16.0, 127), (8.0, 5)])
def test_a_row_is_what_simulated_scores_do(spread, keys):
    scores = spread * np.random.default_rng(0).normal(size=(20_000, keys))
    within_standard_errors(expected_row(spread, keys), row_statistics(scores))


@pytest.mark.parametrize(("spread", "keys", "head_dim"), [(1.0, 61, 1), (4.0, 61, 2), (8.0, 31, 13), (2.0, 31, 64)])
def test_queries_of_few_components_are_averaged_over_their_lengths(spread, keys, head_dim):
    draw = np.random.default_rng(1)
    query, key = draw.normal(size=(8_000, 1, head_dim)), draw.normal(size=(8_000, keys, head_dim))
    scores = (query @ key.swapaxes(1, 2))[:, 0] * spread / math.sqrt(head_dim)
    expected = expected_row(spread, keys, head_dim)
    within_standard_errors(expected, row_statistics(scores))
    one_length = expected_row(spread, keys)
    if head_dim < 3:  # a spread of one number would be seen to be wrong
        with pytest.raises(AssertionError):
            within_standard_errors(one_length, row_statistics(scores))


def test_it_is_the_row_of_expected_softmax_and_tends_to_it():
    for spread in (1e-9, 0.3, 2.0, 5e3):
        row, softmax = expected_row(spread, 29), expected_softmax(spread, 29)
        assert row.entropy == pytest.approx(softmax.entropy, rel=1e-12)
        assert row.jacobian_trace == pytest.approx(softmax.jacobian_trace, rel=1e-12)
        wide = expected_row(spread, 29, head_dim=10**8)
        assert [getattr(wide, name) for name in NAMES] == pytest.approx(
            [getattr(row, name) for name in NAMES], rel=1e-5
        )


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0, 10.0])
def test_the_jacobian_of_two_keys_equals_one_dimensional_quadrature(spread):
    difference = np.linspace(-12, 12, 200_001) * spread * math.sqrt(2)
    density = np.exp(-((difference / spread) ** 2) / 4)
    own = 1 / (1 + np.exp(-difference))
    expected = (density * 4 * (own * (1 - own)) ** 2).sum() / density.sum()
    assert expected_row(spread, 2).jacobian_norm2 == pytest.approx(expected, rel=1e-9)


def test_a_uniform_row_has_the_jacobian_of_equal_weights():
    assert expected_row(0.0, 11).jacobian_norm2 == pytest.approx(10 / 121)
    assert expected_row(1e-4, 11).jacobian_norm2 == pytest.approx(10 / 121, rel=1e-6)


@pytest.mark.parametrize("amiss", [{"keys": 1}, {"spread": math.nan}, {"head_dim": 0}])
def test_what_has_no_row_is_refused(amiss):
    with pytest.raises(SettingError, match="at least 2 keys"):
        expected_row(**{"spread": 1.0, "keys": 7, **amiss})
