"""What the lse that a kernel left tells of rows that are not looked at."""

import math

import pytest
import torch
from torch import nn

from attnscale import score_stats, watch
from attnscale.attending.call import Call
from attnscale.measure.measuring import measured
from attnscale.measure.sampling import foreseen_variance
from attnscale.visibility import EVERYTHING, Visibility


def call_of(query, key, scale=1.0, visibility=EVERYTHING):
    return Call(query, key, key, visibility, 0.0, scale, None)


class Attention(nn.Module):
    def __init__(self, is_causal):
        super().__init__()
        self.project, self.is_causal = nn.Linear(32, 96), is_causal

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.project(x).chunk(3, -1))
        self.operands = q.detach() * 40, k.detach()
        return nn.functional.scaled_dot_product_attention(q * 40, k, v, is_causal=self.is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_the_largest_score_of_a_watched_kernel_is_known_up_to_the_logarithm_of_its_keys(is_causal, inference):
    torch.manual_seed(0)
    model = Attention(is_causal)
    with torch.inference_mode(inference), watch(model, rows=16) as seen:
        model(torch.randn(3, 97, 32))
    stats, exact = next(iter(seen.layers.values())).stats, score_stats(*model.operands, is_causal=is_causal)
    assert (exact.max <= stats.max_bound).all()
    assert (stats.max_bound <= exact.max + math.log(97) + 1e-2).all()


def test_what_is_foreseen_of_a_row_goes_with_what_it_has():
    torch.manual_seed(0)
    query = torch.randn(2, 6, 300, 16) * torch.linspace(0.1, 4.0, 300)[:, None]
    key = torch.randn(2, 3, 200, 16) + torch.randn(16)
    scores = query @ key.repeat_interleave(2, 1).mT * 0.25
    exact = scores.var(-1) + (scores.mean(-1) - scores.mean((0, 2, 3))[:, None]).square()
    told = foreseen_variance(call_of(query, key, 0.25))
    for one, other in zip(exact.transpose(0, 1).flatten(1), told.transpose(0, 1).flatten(1), strict=True):
        assert torch.corrcoef(torch.stack([one, other]))[0, 1] > 0.95


def test_rows_that_stand_out_are_looked_at_for_certain():
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 400, 16), torch.randn(1, 2, 400, 16)
    query[0, 1, 321] *= 30
    exact = score_stats(query, key, scale=0.25)
    for _ in range(5):
        stats = measured(call_of(query, key, 0.25), 32, (query @ key.mT * 0.25).logsumexp(-1))
        torch.testing.assert_close(stats.max[1], exact.max[1])


@pytest.mark.parametrize("size", [1e18, 1e37])
def test_rows_of_a_run_that_explodes_are_foreseen_and_nobody_is_warned_of_their_squares(size):
    query, key = size * torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 8)
    assert foreseen_variance(call_of(query, key)).isfinite().all()


def test_one_key_has_nothing_to_spread():
    query, key = torch.randn(1, 2, 50, 8), torch.randn(1, 2, 1, 8)
    stats = measured(call_of(query, key), 16, (query @ key.mT).logsumexp(-1))
    assert (stats.max <= stats.max_bound).all()
    assert stats.entropy.tolist() == [0.0, 0.0]


def test_rows_that_see_nothing_are_bounded_as_before():
    query, key = -torch.ones(1, 1, 40, 8), torch.ones(1, 1, 40, 8)
    seen = Visibility(mask=torch.arange(40)[:, None].expand(40, 40)[None, None] > 3)
    lse = torch.full((1, 1, 40), -8.0 + math.log(40)).masked_fill(torch.arange(40) < 4, 0.0)
    told = measured(call_of(query, key, visibility=seen), 16, lse)
    torch.testing.assert_close(told.max_bound, measured(call_of(query, key, visibility=seen), 16).max_bound)
