"""The oracle against what can be worked out by hand."""

import numpy as np
import pytest

from attnscale import reference


def test_softmax_sums_to_one_on_any_axis_ignores_a_shift_and_does_not_overflow():
    x = np.random.default_rng(0).normal(size=(3, 5)) * 10
    p = reference.softmax(x)
    np.testing.assert_allclose(p.sum(-1), 1.0, rtol=1e-15)
    np.testing.assert_allclose(reference.softmax(x + 1e5), p, rtol=1e-9)
    np.testing.assert_allclose(reference.softmax(x.T, axis=0), p.T)
    np.testing.assert_array_equal(reference.softmax([1e308, 0.0]), [1.0, 0.0])
    np.testing.assert_array_equal(reference.softmax(np.full((2, 3), -np.inf)), np.zeros((2, 3)))


def test_jacobian_is_the_derivative_of_softmax():
    x, step = np.random.default_rng(1).normal(size=(2, 5)), 1e-6
    numeric = np.stack(
        [(reference.softmax(x + step * e) - reference.softmax(x - step * e)) / (2 * step) for e in np.eye(5)], axis=-1
    )
    np.testing.assert_allclose(reference.softmax_jacobian(reference.softmax(x)), numeric, atol=1e-9)


def test_attention_by_hand():
    # scores 1 and 0, divided by √4 = 2: weights e^½ : 1
    output, weights = reference.scaled_dot_product_attention([[1, 0, 0, 0]], np.eye(4)[:2], [[3.0], [5.0]])
    first = np.exp(0.5) / (np.exp(0.5) + 1)
    np.testing.assert_allclose(weights, [[first, 1 - first]])
    np.testing.assert_allclose(output, [[3 * first + 5 * (1 - first)]])


def test_boolean_and_float_masks_say_the_same():
    rng = np.random.default_rng(2)
    q, k, v = rng.normal(size=(2, 3, 5, 11)), rng.normal(size=(2, 3, 7, 11)), rng.normal(size=(2, 3, 7, 13))
    visible = rng.random((5, 7)) < 0.5
    by_bool = reference.scaled_dot_product_attention(q, k, v, mask=visible)
    by_float = reference.scaled_dot_product_attention(q, k, v, mask=np.where(visible, 0.0, -np.inf))
    for left, right in zip(by_bool, by_float, strict=True):
        np.testing.assert_array_equal(left, right)
    assert (by_bool[1][..., ~visible] == 0).all()


def test_softcap_bounds_scores_and_leaves_small_ones():
    scores = reference.attention_scores([[1e3]], [[1.0], [1e-6]], scale=1.0, softcap=30.0)
    np.testing.assert_allclose(scores, [[30.0, 1e-3]], rtol=1e-6)


def test_statistics_of_uniform_and_one_hot_rows():
    n = 7
    uniform = reference.row_statistics(np.zeros(n))
    assert (uniform.entropy, uniform.top1, uniform.jacobian_trace) == pytest.approx((np.log(n), 1 / n, 1 - 1 / n))
    assert (uniform.entropy_ratio, uniform.effective_keys, uniform.lse) == pytest.approx((1.0, n, np.log(n)))
    one_hot = reference.row_statistics([1000.0] + [0.0] * (n - 1))
    assert (one_hot.entropy, one_hot.top1, one_hot.jacobian_trace, one_hot.jacobian_norm2) == (0.0, 1.0, 0.0, 0.0)


def test_statistics_follow_from_the_jacobian_and_the_definition():
    scores = np.random.default_rng(3).normal(size=(3, 11)) * 2
    p = reference.softmax(scores)
    jacobian = reference.softmax_jacobian(p)
    stats = reference.row_statistics(scores)
    np.testing.assert_allclose(stats.jacobian_trace, np.trace(jacobian, axis1=-2, axis2=-1))
    np.testing.assert_allclose(stats.jacobian_norm2, (jacobian**2).sum((-2, -1)))
    np.testing.assert_allclose(stats.lse, np.log(np.exp(scores).sum(-1)))
    np.testing.assert_allclose(stats.entropy, stats.lse - (p * scores).sum(-1))
    np.testing.assert_allclose(stats.max, scores.max(-1))


def test_rows_with_too_few_keys_are_left_out():
    stats = reference.row_statistics([[-np.inf, -np.inf], [0.5, -np.inf]])
    np.testing.assert_array_equal(stats.visible, [0, 1])
    assert np.isnan(stats.entropy[0])
    assert np.isnan(stats.entropy_ratio).all()
    assert stats.top1[1] == 1.0


def test_moments_count_visible_scores_only():
    assert reference.score_moments([[1.0, 3.0], [-np.inf, 5.0]]) == (3, 3.0, pytest.approx(8 / 3))
