"""Statistics of sampled rows of scores in memory, in Triton's interpreter."""

import pytest
import torch

from attnscale.measure.pooled import Table
from attnscale.measure.stats import ScoreStats

from .interpreting import UNFIT, mended_interpreter  # noqa: F401
from .oracle import assert_stats

if UNFIT:
    pytest.skip(UNFIT, allow_module_level=True)

from attnscale.measure.cuda import finish, score_matrix

batch, heads, q_len, kv_len = 2, 3, 5, 151


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["plain", "causal", "left out", "turned"])
def test_rows_in_memory_have_their_statistics(dtype, case):
    scores = 3 * torch.randn(batch, heads, q_len, kv_len, generator=torch.Generator().manual_seed(0)).to(dtype)
    left_out = torch.arange(q_len) >= torch.tensor([[q_len], [2]]) if case == "left out" else None
    if case == "causal":
        scores = scores.masked_fill(~torch.ones(q_len, kv_len, dtype=torch.bool).tril(7), torch.finfo(dtype).min)
    if case == "turned":
        scores = scores.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    rows = torch.arange(q_len, dtype=torch.int32).expand(batch, -1).contiguous()
    sums = torch.empty(8, 1, batch, heads, q_len)
    score_matrix.sum_rows(scores, left_out, rows, sums)
    stats = ScoreStats(heads, exact=True, pool=Table(finish.finish(sums, torch.ones(q_len).double())))
    expected = scores.double().masked_fill(scores.double() < -1e8, -torch.inf)
    expected = expected if left_out is None else expected.masked_fill(left_out[:, None, :, None], -torch.inf)
    assert_stats(stats, expected.numpy(), rtol=2e-5, atol=2e-5)


def test_a_score_that_is_no_number_is_counted():
    scores = torch.randn(batch, heads, q_len, kv_len)
    scores[1, 2, 3, 4] = torch.nan
    sums = torch.empty(8, 1, batch, heads, q_len)
    score_matrix.sum_rows(scores, None, torch.arange(q_len, dtype=torch.int32).expand(batch, -1).contiguous(), sums)
    stats = ScoreStats(heads, exact=True, pool=Table(finish.finish(sums, torch.ones(q_len).double())))
    assert stats.std.isnan().tolist() == [False, False, True]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scale_is_the_slope_of_the_scores_on_the_product(softcap, dtype):
    torch.manual_seed(0)
    query, key = torch.randn(batch, q_len, heads, 11).transpose(1, 2), torch.randn(batch, heads, kv_len, 11)
    scales = torch.tensor([0.25, 0.5, 0.1])
    scores = query @ key.mT * scales[:, None, None] + torch.randn(q_len, 1)
    scores = scores if softcap is None else softcap * torch.tanh((scores - scores.mean(-1, keepdim=True)) / softcap)
    scores = scores.masked_fill(torch.arange(kv_len) > 140, torch.finfo(dtype).min).to(dtype)
    found = torch.empty(heads, dtype=torch.float64)
    multiplier, stated = torch.tensor([0.25, 0.25, 0.1]), torch.tensor([0.125, 0.125, 0.05])
    rows = torch.tensor([0, 2, 4])
    score_matrix.find_scales(scores, query, key, rows, multiplier, stated, softcap, 0.02, found)
    assert found.tolist() == pytest.approx([0.125, 0.25, 0.05], rel=2e-2 if dtype == torch.bfloat16 else 1e-4)
    if dtype == torch.float32:
        assert found[[0, 2]].tolist() == stated.double()[[0, 2]].tolist()  # they agree, so that it is exactly the plan


def test_scores_that_do_not_follow_the_product_have_the_planned_scale():
    query, key, found = torch.zeros(1, 2, 5, 7), torch.randn(1, 2, 9, 7), torch.empty(2, dtype=torch.float64)
    scores, one = torch.randn(1, 2, 5, 9), torch.ones(2)
    score_matrix.find_scales(scores, query, key, torch.tensor([1]), one, one / 4, None, 0.0, found)
    assert found.tolist() == [0.25, 0.25]
