"""What the lse that a kernel left tells of rows that are not looked at."""

import math

import pytest
import torch
from torch import nn

from attnscale import score_stats, watch
from attnscale.attending.call import Call
from attnscale.measure.measuring import measured
from attnscale.visibility import EVERYTHING


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


def test_rows_that_stand_out_are_looked_at_for_certain():
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 400, 16), torch.randn(1, 2, 400, 16)
    query[0, 1, 321] *= 30
    exact = score_stats(query, key, scale=0.25)
    for _ in range(5):
        stats = measured(call_of(query, key, 0.25), 32, (query @ key.mT * 0.25).logsumexp(-1))
        torch.testing.assert_close(stats.max[1], exact.max[1])
