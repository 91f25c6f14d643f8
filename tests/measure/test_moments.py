"""Linear-time moments against the full matrix, and at a size where there is none."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from attnscale import Visibility, reference, score_moments, score_stats
from tests.measure.oracle import expected_stats


@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(1, 1), (5, 7), (7, 5), (127, 129), (300, 200), (200, 300), (1000, 1000)]
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_moments_are_those_of_the_full_matrix(kv_heads, q_len, kv_len, is_causal, offset):
    query, key = torch.randn(2, 4, q_len, 11) + offset, torch.randn(2, kv_heads, kv_len, 11) - offset
    moments = score_moments(query, key, is_causal=is_causal, enable_gqa=True)
    mask = np.tril(np.ones((q_len, kv_len), dtype=bool)) if is_causal else None
    key = key.double().numpy().repeat(4 // kv_heads, axis=1)
    scores = reference.attention_scores(query.double().numpy(), key, mask=mask)
    within = expected_stats(scores)["variance_within_rows"]
    for head in range(4):
        count, mean, variance = reference.score_moments(scores[:, head])
        assert moments.count[head] == count
        assert moments.mean[head].item() == pytest.approx(mean, rel=1e-5, abs=1e-6)
        assert moments.variance[head].item() == pytest.approx(variance, rel=1e-5, abs=1e-9)
        assert moments.variance_within_rows[head].item() == pytest.approx(within[head], rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("is_causal", [False, True])
def test_shifts_of_whole_rows_do_not_hide_the_spread_within_rows(is_causal):
    query, key = torch.randn(2, 3, 211, 13), torch.randn(2, 3, 211, 13)
    whole = score_moments(query, key, is_causal=is_causal).variance_within_rows
    shifted = score_moments(query, key + 100.0, is_causal=is_causal)
    assert (shifted.variance > 1000 * shifted.variance_within_rows).all()
    torch.testing.assert_close(shifted.variance_within_rows, whole, rtol=1e-4, atol=0.0)
    exact = score_stats(query, key + 100.0, is_causal=is_causal)
    torch.testing.assert_close(exact.variance_within_rows, whole, rtol=1e-4, atol=0.0)


MILLION = """
import resource, sys, torch
from attnscale import score_moments
query, key = torch.randn(1, 1, 1_000_000, 64), torch.randn(1, 1, 1_000_000, 64)
score_moments(query[..., :1000, :], key[..., :1000, :])  # what is imported is not counted
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
moments = score_moments(query, key, is_causal=sys.argv[1] == "True")
taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
print(taken, moments.variance.item(), moments.count.item())
"""


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_million_tokens_take_little_memory(is_causal):
    code = [sys.executable, "-c", MILLION, str(is_causal)]
    taken, variance, count = map(float, subprocess.run(code, capture_output=True, text=True, check=True).stdout.split())
    assert taken < 1200  # MB: two copies in float64 at most, where all scores would take four million
    # of 10¹² scores of unit variance; q and k themselves vary by √(2/n·64)
    assert variance == pytest.approx(1.0, abs=0.01)
    assert count == (1_000_000 * 1_000_001 // 2 if is_causal else 10**12)


def test_moments_merge_over_batches_and_keys():
    query, key = torch.randn(3, 2, 50, 8, dtype=torch.float64) + 1, torch.randn(3, 2, 70, 8, dtype=torch.float64)
    whole = score_moments(query, key)
    by_batch = score_moments(query[:1], key[:1]) + score_moments(query[1:], key[1:])
    by_key = score_moments(query, key[..., :13, :]) + score_moments(query, key[..., 13:, :])
    torch.testing.assert_close(by_batch.variance_within_rows, whole.variance_within_rows, rtol=1e-12, atol=1e-14)
    for parts in (by_batch, by_key):
        torch.testing.assert_close(parts.mean, whole.mean, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(parts.variance, whole.variance, rtol=1e-12, atol=1e-14)
        assert parts.count.tolist() == whole.count.tolist()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": Visibility(last=-31)}], ids=str)
@pytest.mark.parametrize(("batch", "kv_len"), [(0, 29), (2, 0)])
def test_scores_that_there_are_none_of_have_no_mean(batch, kv_len, options):
    query, key = torch.randn(batch, 3, 23, 8), torch.randn(batch, 3, kv_len, 8)
    moments = score_moments(query, key, **options)
    assert moments.count.tolist() == [0, 0, 0]
    assert all(found.isnan().all() for found in (moments.mean, moments.variance, moments.variance_within_rows))
    some = score_moments(torch.randn(2, 3, 23, 8), torch.randn(2, 3, 29, 8))
    for merged in (moments + some, some + moments):
        assert torch.equal(merged.mean, some.mean)
        torch.testing.assert_close(merged.variance, some.variance)


def test_a_mask_or_soft_cap_is_ignored_with_a_note():
    query, key = torch.randn(2, 3, 23, 8), torch.randn(2, 3, 29, 8)
    mask = torch.rand(23, 29) < 0.5
    for options, obstacle in (({"attn_mask": mask}, "mask"), ({"softcap": 0.7}, "soft-cap")):
        moments = score_moments(query, key, **options)
        assert obstacle in moments.method
        numpy_mask = mask.numpy() if "attn_mask" in options else None
        scores = reference.attention_scores(query.numpy(), key.numpy(), mask=numpy_mask, softcap=options.get("softcap"))
        within = expected_stats(scores)["variance_within_rows"]
        np.testing.assert_allclose(moments.variance_within_rows, within, rtol=1e-5)
        for head in range(3):
            count, mean, variance = reference.score_moments(scores[:, head])
            assert moments.count[head] == count
            assert moments.mean[head].item() == pytest.approx(mean, abs=1e-5)
            assert moments.variance[head].item() == pytest.approx(variance, rel=1e-5)
    assert score_moments(query, key).method == "linear time"
