"""score_stats and attention_with_stats on a CUDA device. Run with `make gpu`."""

import math

import numpy as np
import pytest
import torch

from attnscale import attention, attention_with_stats, reference, score_stats
from attnscale.measure.statistics import of_scores

from .oracle import assert_stats

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's own, which differ from version to version
]
heads, q_len, kv_len = 4, 197, 211


def qkv(dtype, head_dim, kv_heads=heads):
    shapes = (heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, head_dim)
    return tuple(torch.randn(2, *shape, device="cuda", dtype=dtype) for shape in shapes)


def scores_of(query, key, is_causal):
    q, k = (tensor.detach().double().cpu().numpy() for tensor in (query, key))
    mask = np.tril(np.ones((q_len, kv_len), dtype=bool)) if is_causal else None
    return reference.attention_scores(q, k.repeat(heads // key.shape[1], axis=1), mask=mask)


CASES = [
    (torch.bfloat16, 64, heads, True),
    (torch.bfloat16, 128, 2, False),
    (torch.float16, 40, heads, True),
    (torch.float32, 64, 1, True),
    (torch.float64, 16, heads, True),
]


@pytest.mark.parametrize(("dtype", "head_dim", "kv_heads", "is_causal"), CASES)
def test_statistics_are_those_of_the_full_matrix(dtype, head_dim, kv_heads, is_causal):
    query, key, value = qkv(dtype, head_dim, kv_heads)
    options = {"is_causal": is_causal, "enable_gqa": kv_heads < heads}
    scores = scores_of(query, key, is_causal)
    assert_stats(score_stats(query, key, **options), scores, rtol=5e-5, atol=5e-5)
    output, stats = attention_with_stats(query, key, value, **options)
    assert_stats(stats, scores, rtol=5e-5, atol=5e-5)
    torch.testing.assert_close(output, attention(query, key, value, **options), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 40)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["booleans", "floats", "key padding"])
def test_masks_and_soft_caps_have_a_kernel_of_their_own(kind, softcap, dtype, head_dim, monkeypatch):
    monkeypatch.setattr("attnscale.measure.measuring.measure_rows", None)
    query, key, value = qkv(dtype, head_dim)
    mask = torch.rand(q_len, kv_len, device="cuda") < 0.5
    if kind == "floats":
        mask = torch.randn(q_len, kv_len, device="cuda", dtype=dtype).masked_fill(~mask, -torch.inf)
    if kind == "key padding":
        mask = (torch.arange(kv_len, device="cuda") < torch.tensor([[151], [kv_len]], device="cuda"))[:, None, None]
    q, k = (tensor.double().cpu().numpy() for tensor in (query, key))
    added = mask.cpu().double().numpy() if kind == "floats" else mask.cpu().numpy()
    scores = reference.attention_scores(q, k, mask=added, softcap=softcap)
    assert_stats(score_stats(query, key, attn_mask=mask, softcap=softcap), scores, rtol=5e-5, atol=5e-5)
    _, stats = attention_with_stats(query, key, value, mask, softcap=softcap)
    assert_stats(stats, scores, rtol=5e-5, atol=5e-5)
    sampled = score_stats(query, key, attn_mask=mask, softcap=softcap, rows=64)
    assert sampled.doubts() == [None] * heads
    for name in ("entropy", "mean", "std_within_rows"):
        off = (getattr(sampled, name) - getattr(stats, name)).abs()
        assert (off <= 6 * sampled.stderr(name) + 1e-5).all(), name
    assert (stats.max <= sampled.max_bound).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_sampled_statistics_lie_within_their_errors(is_causal):
    query, key, value = qkv(torch.bfloat16, 64)
    exact = score_stats(query, key, is_causal=is_causal)
    _, stats = attention_with_stats(query, key, value, is_causal=is_causal, rows=64)
    assert stats.rows.tolist() == [64] * heads
    assert stats.doubts() == [None] * heads
    for name, statistic in of_scores().items():
        if statistic.has_error and name != "saturated":
            off = (getattr(stats, name) - getattr(exact, name)).abs()
            assert (off <= 6 * stats.stderr(name) + 1e-5).all(), name
    assert (stats.max <= exact.max + 1e-4).all()
    assert (exact.max <= stats.max_bound).all()


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.float32, 64), (torch.float16, 40)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sampling_leaves_output_and_gradients_as_they_are_and_brackets_the_maximum_by_the_lse(
    dtype, head_dim, is_causal
):
    tensors = [tensor.requires_grad_() for tensor in qkv(dtype, head_dim)]
    output, stats = attention_with_stats(*tensors, is_causal=is_causal, rows=32)
    plain = attention(*tensors, is_causal=is_causal)
    assert torch.equal(output, plain)
    direction = torch.randn_like(output)
    found, wanted = (torch.autograd.grad(result, tensors, direction) for result in (output, plain))
    torch.testing.assert_close(found, wanted, atol=1e-2, rtol=1e-2)  # torch's backwards add up in any order
    exact = score_stats(*(tensor.detach() for tensor in tensors[:2]), is_causal=is_causal)
    assert (exact.max <= stats.max_bound).all()
    assert (stats.max_bound <= exact.max + math.log(kv_len) + 1e-3).all()


def test_a_captured_graph_keeps_its_sample_after_later_draws():
    query, key, value = qkv(torch.bfloat16, 64)
    for _ in range(2):
        attention_with_stats(query, key, value, is_causal=True, rows=32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, captured = attention_with_stats(query, key, value, is_causal=True, rows=32)
    for _ in range(20):  # past the draws at hand, whose memory would be given to others
        score_stats(query, key, is_causal=True, rows=32)
    overwritten = [torch.full((64,), 2**30, device="cuda", dtype=torch.int32) for _ in range(1000)]
    for tensor in (query, key):
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    exact = score_stats(query, key, is_causal=True)
    assert captured.rows.tolist() == [32] * heads
    for name in ("entropy", "top1", "std"):
        error = (getattr(captured, name) - getattr(exact, name)).abs()
        assert (error <= 6 * captured.stderr(name).nan_to_num(nan=torch.inf) + 1e-5).all(), name
    del overwritten


def test_statistics_take_no_more_than_64_bytes_a_row_and_head_with_everything_read_and_nothing_of_the_inputs():
    length = 8192

    def peak(run):
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = run()
        return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before, kept

    def inputs():
        return (torch.randn(1, 8, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def plain():
        attention(*inputs())

    def measured():
        _, stats = attention_with_stats(*inputs())
        stats.to_dict()
        return stats

    (most, left, stats), (least, *_) = peak(measured), peak(plain)
    assert most - least <= 64 * 8 * length
    assert left <= 4096  # the table of the heads
    assert stats.rows.tolist() == [length] * 8
