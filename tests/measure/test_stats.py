"""score_stats() against the full matrix: dtypes, masks, groups, rules, extremes; and what it promises of any input."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnscale import Visibility, attention, attention_with_stats, reference, score_stats
from attnscale.errors import SettingError, ShapeError

from ..rules.oracle import EXAMPLES
from .oracle import NAMES, assert_stats

batch, heads, q_len, kv_len, head_dim = 2, 3, 37, 41, 11


def tensors(dtype=torch.float32, kv_heads=heads, q_len=q_len, kv_len=kv_len):
    return (
        torch.randn(batch, heads, q_len, head_dim, dtype=dtype),
        torch.randn(batch, kv_heads, kv_len, head_dim, dtype=dtype),
    )


def numpy(tensor):
    return tensor.double().numpy()


def scores_of(query, key, mask=None, scale=None, softcap=None):
    group = query.shape[-3] // key.shape[-3]
    return reference.attention_scores(numpy(query), numpy(key).repeat(group, axis=-3), scale, mask, softcap)


CAUSAL = np.tril(np.ones((q_len, kv_len), dtype=bool))
VISIBLE = torch.rand(q_len, kv_len) < 0.5
VISIBLE[3] = False  # a row that sees nothing
VISIBLE[4] = torch.arange(kv_len) == 5  # and one that sees one key
BIAS = torch.randn(batch, 1, q_len, kv_len)
MASKS = {
    "none": ({}, None),
    "causal": ({"is_causal": True}, CAUSAL),
    "boolean": ({"attn_mask": VISIBLE}, VISIBLE.numpy()),
    "keys": ({"attn_mask": VISIBLE[:1]}, VISIBLE[:1].numpy()),
    "bias": ({"attn_mask": BIAS}, BIAS.double().numpy()),
}


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", [heads, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_statistic_is_that_of_the_full_matrix(dtype, kv_heads, mask, softcap):
    query, key = tensors(dtype, kv_heads)
    options, visible = MASKS[mask]
    stats = score_stats(query, key, enable_gqa=kv_heads < heads, softcap=softcap, **options)
    assert stats.exact
    assert_stats(stats, scores_of(query, key, visible, softcap=softcap))
    np.testing.assert_array_equal(stats.max, stats.max_bound)
    assert all(stats.stderr(name).abs().max() == 0 for name in NAMES if not name.startswith("max"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_rule_is_measured_as_it_is_computed(name):
    query, key = tensors(torch.float64)
    rule = EXAMPLES[name].make(heads, heads, head_dim)
    visible = CAUSAL.sum(-1, keepdims=True)
    scores = EXAMPLES[name].scores(rule, numpy(query), numpy(key), visible)
    assert_stats(score_stats(query, key, scale=rule, is_causal=True), np.where(CAUSAL, scores, -np.inf))


@pytest.mark.parametrize("shape", [(q_len, head_dim), (heads, q_len, head_dim), (2, 2, heads, q_len, head_dim)])
def test_leading_dimensions_are_pooled_into_the_batch(shape):
    query, key = torch.randn(shape), torch.randn(shape)
    scores = (
        scores_of(query[None], key[None]) if len(shape) == 3 else reference.attention_scores(numpy(query), numpy(key))
    )
    assert_stats(score_stats(query, key), scores.reshape(-1, shape[-3] if len(shape) > 2 else 1, q_len, q_len))


@pytest.mark.parametrize("size", [1e4, 1e-4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_large_and_small_scores_lose_nothing(size, is_causal):
    query, key = tensors()
    scores = scores_of(query, key, CAUSAL if is_causal else None, scale=size)
    # float32 scores of 1e4 are known to 1e-3; a row's weights to that, relatively
    tolerance = 5e-3 if size > 1 else 2e-5
    assert_stats(score_stats(query, key, scale=size, is_causal=is_causal), scores, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("value", [0.0, 3.0, -1e4])
def test_constant_rows_are_exactly_uniform(value):
    keys = 257
    query, key = torch.full((1, 1, 5, 1), value), torch.ones(1, 1, keys, 1)
    stats = score_stats(query, key, scale=1.0)
    assert stats.entropy.item() == pytest.approx(math.log(keys), rel=1e-15)
    assert stats.top1.item() == pytest.approx(1 / keys, rel=1e-15)
    assert stats.entropy_ratio.item() == pytest.approx(1.0, rel=1e-15)
    assert (stats.std.item(), stats.mean.item(), stats.max.item()) == (0.0, value, value)


def test_one_hot_rows_have_no_gradient_and_never_a_negative_one():
    query, key = torch.eye(7)[None, None], torch.eye(7)[None, None] * 1e5
    stats = score_stats(query, key, scale=1.0)
    assert (stats.jacobian_trace.item(), stats.top1.item(), stats.saturated.item()) == (0.0, 1.0, 1.0)
    assert (stats.entropy.item(), stats.effective_keys.item()) == (0.0, 1.0)


def test_rows_that_see_nothing_or_one_key_are_counted_out():
    query, key = tensors()
    nothing = torch.zeros(q_len, kv_len, dtype=torch.bool)
    empty = score_stats(query, key, attn_mask=nothing)
    assert empty.rows.tolist() == [0, 0, 0]
    assert empty.entropy.isnan().all()
    assert empty.to_dict()["entropy"] == [None, None, None]
    nothing[:, 4] = True
    single = score_stats(query, key, attn_mask=nothing)
    assert single.rows.tolist() == [batch * q_len] * heads
    assert single.entropy_ratio.isnan().all()
    assert single.entropy.tolist() == [0.0] * heads
    # merging with rows that do see something brings no NaN along
    both = empty + score_stats(query, key)
    torch.testing.assert_close(both.entropy, score_stats(query, key).entropy)


SINKS = torch.tensor([-3.0, 0.5, 40.0])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scale", [0.1, 2.0])
def test_a_learned_sink_joins_the_denominator_of_every_row(mask, scale):
    query, key = tensors()
    options, visible = MASKS[mask]
    stats = score_stats(query, key, scale=scale, sinks=SINKS, **options)
    assert_stats(stats, scores_of(query, key, visible, scale=scale), sinks=SINKS.double())
    assert_stats(stats + stats, np.concatenate([scores_of(query, key, visible, scale=scale)] * 2), sinks=SINKS.double())
    without = score_stats(query, key, scale=scale, sinks=torch.full((heads,), -torch.inf), **options)
    torch.testing.assert_close(without.entropy, score_stats(query, key, scale=scale, **options).entropy)
    assert without.learned_sink.isnan().all()


def test_a_learned_sink_in_sampled_rows_has_errors_that_hold():
    query, key = torch.randn(2, heads, 307, head_dim), torch.randn(2, heads, 307, head_dim)
    exact = score_stats(query, key, is_causal=True, sinks=SINKS)
    some = score_stats(query, key, is_causal=True, sinks=SINKS, rows=64)
    for name in ("entropy", "top1", "sink", "jacobian_trace"):
        assert ((getattr(some, name) - getattr(exact, name)).abs() <= 5 * some.stderr(name) + 1e-12).all(), name


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("seen", [Visibility.causal(from_the_end=True), Visibility.causal(window=2)], ids=str)
def test_blocks_of_rows_that_see_no_key_by_their_position_are_counted_out(seen, softcap):
    rows, keys = 307, 7  # more than a block of rows, before the first key or after the last
    query, key = torch.randn(batch, heads, rows, head_dim), torch.randn(batch, heads, keys, head_dim)
    shown = seen.within(rows, keys).shown(slice(0, rows), slice(0, keys), "cpu")
    output, stats = attention_with_stats(query, key, key, seen, softcap=softcap)
    torch.testing.assert_close(output, attention(query, key, key, shown, softcap=softcap))
    assert_stats(stats, scores_of(query, key, shown.numpy(), softcap=softcap))
    assert (score_stats(query, key, attn_mask=seen, softcap=softcap, rows=67).rows <= stats.rows).all()
    assert score_stats(query, key, attn_mask=Visibility(last=-rows), softcap=softcap).rows.tolist() == [0] * heads


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (1, 1), (3, 1)])
def test_tiny_sizes(rows, keys):
    query, key = torch.randn(1, 2, rows, 4), torch.randn(1, 2, keys, 4)
    stats = score_stats(query, key)
    assert stats.rows.tolist() == [rows, rows]
    if rows:
        assert stats.top1.tolist() == [1.0, 1.0]


sizes = st.integers(1, 24)


@given(sizes, sizes, st.floats(0.01, 50), st.integers(0, 2**31), st.booleans())
def test_bounds_shift_scale_and_permutation(rows, keys, spread, seed, is_causal):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, 2, rows, 8, generator=generator, dtype=torch.float64)
    key = torch.randn(1, 2, keys, 8, generator=generator, dtype=torch.float64)
    stats = score_stats(query, key, scale=spread, is_causal=is_causal)
    assert (stats.entropy >= 0).all()
    assert (stats.entropy <= math.log(keys) + 1e-12).all()
    assert ((stats.top1 >= 1 / keys - 1e-12) & (stats.top1 <= 1)).all()
    assert ((stats.jacobian_trace >= 0) & (stats.jacobian_trace <= 1 - 1 / keys + 1e-12)).all()
    by_query = score_stats(spread * query, key, scale=1.0, is_causal=is_causal)
    torch.testing.assert_close(by_query.entropy, stats.entropy)
    torch.testing.assert_close(by_query.variance, stats.variance)
    if not is_causal:
        permuted = score_stats(query, key[:, :, torch.randperm(keys)], scale=spread)
        torch.testing.assert_close(permuted.entropy, stats.entropy)
        shifted = score_stats(query, key, scale=spread, attn_mask=torch.full((1, keys), 7.0, dtype=torch.float64))
        torch.testing.assert_close(shifted.entropy, stats.entropy)
        torch.testing.assert_close(shifted.mean, stats.mean + 7.0)


@pytest.mark.parametrize("rows", [0, -1, 2.5, True])
def test_a_number_of_rows_that_is_none_is_refused(rows):
    query, key = tensors()
    with pytest.raises(SettingError, match="rows as a whole number of at least 1"):
        score_stats(query, key, rows=rows)


def test_unlike_heads_do_not_merge_and_the_maximum_has_no_error():
    query, key = tensors()
    stats = score_stats(query, key)
    with pytest.raises(ShapeError, match="same number of heads to merge, got 3 and 2"):
        stats + score_stats(query[:, :2], key[:, :2])
    with pytest.raises(SettingError, match="max and max_bound"):
        stats.stderr("max")
    with pytest.raises(SettingError, match="Expected one of effective_keys, entropy"):
        stats.stderr("median")
