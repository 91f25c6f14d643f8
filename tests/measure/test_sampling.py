"""Sampled statistics: where the rows lie, what the standard errors promise, what the bracket holds."""

import numpy as np
import pytest
import torch

from attnscale import score_stats
from attnscale.measure.sampling import design, sample_positions

SEEDS = 400  # samples, each drawn anew; benchmarks/coverage.py has more, of more heads


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(
    ("rows", "length", "batch"), [(64, 512, 1), (64, 4096, 2), (10, 97, 3), (2, 5, 1), (1, 50, 1), (63, 64, 1)]
)
def test_positions_are_distinct_spread_out_and_stand_for_all(rows, length, batch, uneven):
    sample = sample_positions(rows, length, batch, uneven)
    wanted = max(2, -(-rows // batch))
    assert len(sample.positions) == wanted == len(set(sample.positions.tolist()))
    assert sample.weights.sum().item() == pytest.approx(length)
    assert sample.positions.min() >= 0
    assert sample.positions.max() < length
    assert sample.sizes.sum() == length


def test_as_many_rows_as_there_are_is_exact():
    query, key = torch.randn(2, 3, 16, 8), torch.randn(2, 3, 9, 8)
    assert sample_positions(32, 16, 2, uneven=False) is None
    stats = score_stats(query, key, rows=32)
    assert stats.exact
    torch.testing.assert_close(stats.entropy, score_stats(query, key).entropy)


def test_a_sampled_causal_row_sees_its_own_prefix():
    # zero scores: a row's entropy is the logarithm of its prefix, 6.6 on average and not ln 2048 = 7.6
    query, key = torch.zeros(1, 1, 2048, 8), torch.zeros(1, 1, 2048, 8)
    exact = torch.arange(1, 2049).log().mean().item()
    stats = score_stats(query, key, is_causal=True, rows=64)
    assert stats.entropy.item() == pytest.approx(exact, abs=0.05)
    assert stats.entropy_ratio.item() == pytest.approx(1.0, rel=1e-12)


NAMES = ("mean", "variance", "std", "entropy", "entropy_ratio", "top1", "jacobian_trace", "effective_keys")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("length", "head_dim", "scale", "names"),
    [(512, 16, 0.25, NAMES), (256, 64, 1.0, ["saturated"])],  # at a spread of 8, a fifth of the rows are saturated
)
def test_intervals_cover_and_the_bracket_holds_over_many_seeds(length, head_dim, scale, names, is_causal):
    query, key = torch.randn(1, 4, length, head_dim), torch.randn(1, 4, length, head_dim)
    exact = score_stats(query, key, is_causal=is_causal, scale=scale)
    hits = dict.fromkeys(names, 0.0)
    for _ in range(SEEDS):
        stats = score_stats(query, key, is_causal=is_causal, scale=scale, rows=64)
        for name in names:
            inside = (getattr(stats, name) - getattr(exact, name)).abs() <= 1.96 * stats.stderr(name)
            hits[name] += inside.double().mean().item()
        assert (stats.max <= exact.max + 1e-5).all()
        assert (exact.max <= stats.max_bound).all()
    coverage = {name: hit / SEEDS for name, hit in hits.items()}
    assert all(0.915 <= covered <= 0.985 for covered in coverage.values()), coverage


def test_a_share_of_which_nothing_was_seen_is_not_certain():
    query, key = torch.zeros(1, 2, 630, 8), torch.zeros(1, 2, 7, 8)
    stats = score_stats(query, key, rows=63)  # each row stands for ten
    assert stats.saturated.tolist() == [0.0, 0.0]
    expected = 1.96 / 2**0.5 * (10 * 9) ** 0.5 / 630
    assert stats.stderr("saturated").tolist() == pytest.approx([expected, expected])
    assert stats.stderr("top1").tolist() == [0.0, 0.0]
    twice = stats + stats  # still nothing seen, of twice as many rows
    assert twice.stderr("saturated").tolist() == pytest.approx([expected / 2, expected / 2])


def test_estimates_are_unbiased():
    query, key = torch.randn(2, 2, 300, 8) * torch.linspace(0.5, 3, 300)[:, None], torch.randn(2, 2, 300, 8)
    exact = score_stats(query, key, is_causal=True)
    sampled = [score_stats(query, key, is_causal=True, rows=32) for _ in range(300)]
    for name in ("entropy", "top1", "jacobian_trace", "mean"):
        draws = torch.stack([getattr(stats, name) for stats in sampled])
        error = 4.5 * draws.std(0) / 300**0.5
        assert ((draws.mean(0) - getattr(exact, name)).abs() <= error).all(), name


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(("rows", "length"), [(2, 3), (7, 11), (64, 4099)])
def test_many_draws_at_once_are_draws_of_the_same_design(rows, length, uneven):
    planned = design(rows, length, 1, uneven)
    draws = planned.draws(997)
    assert draws.shape == (997, len(planned.draw()))
    assert draws.flags.c_contiguous  # each is read as one piece of memory
    assert (np.diff(draws, axis=1) > 0).all()
    found = np.apply_along_axis(np.searchsorted, 1, draws, [planned.certain, *planned.edges[1:]])
    assert (found == np.cumsum([planned.certain, *planned.taken])).all()
    if length == 11:
        shares = np.bincount(draws.ravel(), minlength=length) / len(draws)
        wanted = np.repeat(np.array(planned.taken) / np.diff(planned.edges), np.diff(planned.edges))
        assert np.abs(shares[planned.certain :] - wanted).max() < 0.08  # five standard errors
