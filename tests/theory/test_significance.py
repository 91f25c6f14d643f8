"""Student's t against its closed form, and Holm's correction."""

import mpmath
import pytest

from attnscale.theory.significance import holm, student_quantile, student_tail


@pytest.mark.parametrize("freedom", [1, 2, 7, 30, 1000])
@pytest.mark.parametrize("t", [0.1, 2.0, 50.0, 1e6])
def test_the_tail_is_the_incomplete_beta_function(freedom, t):
    exact = mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + mpmath.mpf(t) ** 2), regularized=True)
    assert student_tail(t, freedom) == pytest.approx(float(exact), rel=1e-4, abs=1e-300)


@pytest.mark.parametrize(("freedom", "level"), [(1, 0.95), (5, 0.99), (7, 1 - 1e-5), (200, 0.999)])
def test_the_quantile_is_the_inverse_of_the_tail(freedom, level):
    assert student_tail(student_quantile(freedom, level), freedom) == pytest.approx(1 - level, rel=1e-7)


def test_holm_stops_at_the_first_chance_that_is_not_significant():
    assert holm([0.9, 0.001, 0.02, 0.012], 0.05).tolist() == [False, True, True, True]
    assert holm([0.9, 0.001, 0.03, 0.02], 0.05).tolist() == [False, True, False, False]
    assert holm([], 0.05).tolist() == []
