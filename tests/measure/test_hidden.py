"""Masks that hide by a number: the statistics are those of the boolean mask, and what watch() says of the same call."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnscale import attention_with_stats, score_moments, score_stats, watch
from attnscale.visibility import shown_by
from attnscale.watching.rows import hiding_gap
from tests.measure.oracle import NAMES

batch, heads, length, head_dim = 2, 3, 53, 11
SHOWN = torch.ones(length, length, dtype=torch.bool).tril()
SHOWN[:, 7] = False
SHOWN[0] = False  # a row that sees nothing
NUMBERS = {
    "of float32": torch.finfo(torch.float32).min,
    "of bfloat16": torch.finfo(torch.bfloat16).min,
    "of float16": torch.finfo(torch.float16).min,
    "half of float32": torch.finfo(torch.float32).min / 2,
    "a billion": -1e9,
    "ten thousand": -1e4,
    "a hundred": -100.0,
}


def tensors():
    return (torch.randn(batch, heads, length, head_dim) for _ in range(3))


def assert_same(found, expected):
    for name in (*NAMES, "rows", "count"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), equal_nan=True, msg=name)


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_a_key_hidden_by_a_number_is_hidden(number):
    query, key, value = tensors()
    mask = torch.zeros(SHOWN.shape).masked_fill(~SHOWN, number)
    expected = score_stats(query, key, attn_mask=SHOWN)
    assert_same(score_stats(query, key, attn_mask=mask), expected)
    output, stats = attention_with_stats(query, key, value, attn_mask=mask)
    assert_same(stats, expected)
    # the row of such numbers alone has weights nevertheless, as SDPA gives them
    torch.testing.assert_close(output, F.scaled_dot_product_attention(query, key, value, mask))
    moments = score_moments(query, key, attn_mask=mask)
    torch.testing.assert_close(moments.variance, expected.variance)


class Attention(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.query, self.key = (nn.Linear(heads * head_dim, heads * head_dim) for _ in range(2))
        self.mask = mask

    def project(self, x):
        return (part(x).unflatten(-1, (heads, head_dim)).transpose(1, 2) for part in (self.query, self.key))


class Fused(Attention):
    def forward(self, x):
        query, key = self.project(x)
        return F.scaled_dot_product_attention(query, key, key, self.mask)


class Written(Attention):
    def forward(self, x):
        query, key = self.project(x)
        return (query @ key.mT * head_dim**-0.5 + self.mask).softmax(-1) @ key


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("kind", [Fused, Written])
def test_watch_and_score_stats_agree_on_what_a_mask_hides(kind, number):
    shown = SHOWN[1:, 1:].clone()
    shown.fill_diagonal_(True)  # a key that nobody sees would make its query padding, which watch leaves out
    model = kind(torch.zeros(shown.shape).masked_fill(~shown, number))
    x = torch.randn(batch, length - 1, heads * head_dim)
    with watch(model, rows=None) as seen, torch.no_grad():
        model(x)
    with torch.no_grad():
        query, key = model.project(x)
    assert_same(seen.layers[kind.__name__].stats, score_stats(query, key, attn_mask=model.mask))
    assert_same(seen.layers[kind.__name__].stats, score_stats(query, key, attn_mask=shown))


MASKS = {
    "numbers added up": ([0.0, -1e4, -2e4], [True, False, False]),
    "a number and −∞": ([0.0, -1e4, -math.inf], [True, False, False]),
    "a bias and −∞": ([0.0, -1.0, -60.0, -math.inf], [True, True, True, False]),
    "a bias and the lowest number": ([0.5, -3.0, torch.finfo(torch.float32).min], [True, True, False]),
    "a bias": ([0.0, -20.0, -70.0], [True, True, True]),
    "nothing": ([0.0, 0.0], [True, True]),
    "NaN": ([0.0, math.nan, -1e9], [True, True, True]),
}


@pytest.mark.parametrize("case", MASKS)
def test_keys_hidden_by_numbers_stay_hidden_by_infinity(case):
    values, expected = MASKS[case]
    mask = torch.tensor(values)
    assert shown_by(mask).tolist() == expected
    assert shown_by(mask.masked_fill(~shown_by(mask), -math.inf)).tolist() == expected
    assert (hiding_gap(mask) is not None) == (False in expected)


@pytest.mark.parametrize("rows", [None, 31])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("of_query", "of_key"), [(1e10, 1e10), (1e20, 1.0), (1.0, 1e20)])
def test_scores_of_1e20_have_a_finite_spread(of_query, of_key, is_causal, rows):
    query, key, value = tensors()
    query, key = query * of_query, key * of_key
    options = {"is_causal": is_causal, "rows": rows}
    expected = score_stats(query.double(), key.double(), is_causal=is_causal)
    for stats in (score_stats(query, key, **options), attention_with_stats(query, key, value, **options)[1]):
        tolerance = 1e-5 if rows is None else 0.5
        torch.testing.assert_close(stats.std, expected.std, rtol=tolerance, atol=0.0)
        assert not stats.stderr("std").isinf().any()  # NaN where rows cannot tell it
        assert (stats.max <= stats.max_bound * (1 + 1e-5)).all()
        assert (expected.max <= stats.max_bound * (1 + 1e-5)).all()
        assert stats.max_bound.isfinite().all()
    moments = score_moments(query, key, is_causal=is_causal)
    torch.testing.assert_close(moments.variance, expected.variance, rtol=1e-5, atol=0.0)
