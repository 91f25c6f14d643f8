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
