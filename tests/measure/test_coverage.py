"""Errors that know when they do not know: the cases of benchmarks/coverage.py, few draws of each."""

import runpy
from pathlib import Path

import pytest
import torch

from attnscale import score_stats
from attnscale.measure.pooled import pool_rows
from attnscale.measure.row_blocks import rows_of
from attnscale.measure.sampling import design
from attnscale.measure.stats import ScoreStats
from attnscale.measure.uncertainty import CONCENTRATED, FEW, SKEWED

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "coverage.py"))
NAMED, coverage = BENCHMARK["NAMED"], BENCHMARK["coverage"]
SAMPLES = 40  # of four heads that share their rows: 95% comes out between 87 and 100


COVERED = {
    "one outlier row in 1,000": NAMED["one outlier row in 1,000"][0],
    "causal batches of few positions": NAMED["causal batches of few positions"][1],
    "effective keys": NAMED["effective keys"][2],
}


@pytest.mark.parametrize("name", COVERED)
def test_intervals_cover_wherever_an_error_is_reported(name):
    shares, told = coverage(COVERED[name], SAMPLES)
    assert told == 1.0
    assert min(shares.values()) >= 0.87, shares


UNTOLD = {
    "heavy tails": (NAMED["heavy tails"][1], SKEWED),
    "more outliers than are taken for certain": (NAMED["more outlier rows than are taken for certain"][0], SKEWED),
    "one row along the keys": (NAMED["others"][0], SKEWED),
    "a head sharp in its last tenth": (NAMED["a head sharp in its last tenth"][1], CONCENTRATED),
    "too few rows": (NAMED["others"][-1], FEW),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_an_error_that_rows_cannot_estimate_is_nan_with_a_reason(name):
    case, reason = UNTOLD[name]
    torch.manual_seed(0)
    query, key = case.operands()
    stats = score_stats(query, key, is_causal=case.is_causal, scale=case.spread / case.head_dim**0.5, rows=case.rows)
    assert stats.doubts() == [reason] * stats.heads
    assert all(stats.stderr(name).isnan().all() for name in BENCHMARK["NAMES"])
    assert stats.entropy.isfinite().all()  # the estimate is one nevertheless


def test_doubts_of_few_rows_fade_as_rows_add_up():
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 97, 64), torch.randn(2, 2, 97, 64)
    parts = [score_stats(query[i : i + 1], key[i : i + 1], rows=11) for i in range(2)]
    assert parts[0].doubts() == [FEW, FEW]
    assert (parts[0] + parts[1]).doubts() == [None, None]
    assert (parts[0] + parts[1]).stderr("entropy").isfinite().all()


def test_positions_drawn_for_each_entry_have_errors_that_cover():
    # what kernels of a GPU look at
    torch.manual_seed(0)
    batch, heads, length = 16, 3, 256
    scores = torch.randn(batch, heads, length, 61) * torch.linspace(0.5, 2.0, length).unsqueeze(-1)
    exact = ScoreStats(heads, exact=True, pool=pool_rows(rows_of(scores, None)))
    planned = design(64, length, batch, uneven=True)
    covered = []
    for _ in range(60):
        sample = planned.sample(torch.from_numpy(planned.draws(batch)).long())
        at = sample.positions[:, None, :, None].expand(-1, heads, -1, scores.shape[-1])
        rows = rows_of(scores.gather(2, at), None)
        stats = ScoreStats(heads, exact=False, pool=pool_rows(rows, None, sample))
        assert stats.doubts() == [None] * heads
        off = torch.stack([(getattr(stats, n) - getattr(exact, n)).abs() / stats.stderr(n) for n in ("entropy", "std")])
        covered.append(off < 1.96)
    share = torch.stack(covered).double().mean()
    assert 0.9 < share < 0.99


def test_rows_drawn_from_a_batch_have_the_sums_of_their_own_entry():
    # every entry has keys of its own size, and so every row tells its entry
    key = torch.ones(3, 1, 7, 1) * torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1, 1)
    query = torch.arange(1.0, 41.0).view(1, 1, 40, 1).expand(3, 1, 40, 1)
    stats = score_stats(query, key, scale=1.0, rows=29)
    assert stats.rows.item() == 29
    draws = torch.stack([score_stats(query, key, scale=1.0, rows=29).mean for _ in range(200)])
    expected = score_stats(query, key, scale=1.0).mean
    assert (draws.mean() - expected).abs() < 4.5 * draws.std() / 200**0.5
