"""The fast path of probes on a GPU measures what score_stats measures."""

import pytest
import torch

import attnscale
from attnscale.measure.cuda.sampled import probe
from attnscale.measure.pooled import TABLE
from attnscale.probes.calls import score_bound
from attnscale.probes.maxima import probe_max

pytestmark = pytest.mark.gpu
BATCH, HEADS, Q_LEN, KV_LEN, HEAD_DIM = 3, 6, 331, 331, 40


def tensors(dtype, kv_heads):
    generator = torch.Generator("cuda").manual_seed(0)
    query = torch.randn(BATCH, Q_LEN, HEADS, HEAD_DIM, device="cuda", generator=generator).to(dtype).transpose(1, 2)
    key = torch.randn(BATCH, KV_LEN, kv_heads, HEAD_DIM, device="cuda", generator=generator).to(dtype).transpose(1, 2)
    return query, key


def masks():
    causal = torch.ones(Q_LEN, KV_LEN, dtype=torch.bool, device="cuda").tril()
    shown = torch.arange(KV_LEN, device="cuda") < torch.tensor([[331], [200], [97]], device="cuda")
    return {
        "none": None,
        "causal": causal[None, None],
        "padding": shown[:, None, None, :],
        "both": causal[None, None] & shown[:, None, None, :],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("name", ["none", "causal", "padding", "both"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_probe_measures_what_score_stats_measures(dtype, kv_heads, name, is_causal):
    (query, key), mask = tensors(dtype, kv_heads), masks()[name]
    hidden = None if mask is None else ~mask.any(-2)[:, 0]
    padding = None if hidden is None else hidden.expand(BATCH, -1)
    if is_causal and mask is not None:
        pytest.skip("SDPA takes one of the two")
    lengths = torch.zeros(2, 3, HEADS, dtype=torch.float64, device="cuda")
    tables = torch.zeros(40, HEADS, TABLE, dtype=torch.float64, device="cuda")
    found = [probe(query, key, mask, hidden, True, is_causal, 0.3, 128, table, lengths) for table in tables]
    seen = mask if padding is None else mask & ~padding[:, None, :, None]
    exact = attnscale.score_stats(query, key, scale=0.3, attn_mask=seen, is_causal=is_causal, enable_gqa=True)
    for statistic in ("mean", "std", "entropy", "top1", "effective_keys"):
        sampled = torch.stack([getattr(each.stats, statistic) for each in found])
        error = sampled.double().std(0) / len(found) ** 0.5
        assert bool(((sampled.double().mean(0) - getattr(exact, statistic)).abs() <= 5 * error + 1e-6).all()), statistic
    largest = torch.stack([each.stats.max for each in found]).amax(0)
    assert bool((largest <= exact.max + 1e-3).all())
    assert bool((exact.max <= score_bound(0.3, *lengths[:, 2])).all())
    if padding is None:
        expected = query.double().square().sum((0, 2, 3))
        torch.testing.assert_close(lengths[0, 0], 40 * expected, rtol=1e-5, atol=0)
        assert (lengths[:, 1] == 40 * BATCH * Q_LEN).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("name", ["none", "causal", "padding", "both"])
def test_a_max_probe_finds_the_largest_score_of_heads_over_the_limit(dtype, kv_heads, name):
    (query, key), mask = tensors(dtype, kv_heads), masks()[name]
    query[:, 1] *= 7
    exact = attnscale.score_stats(query, key, scale=0.3, attn_mask=mask, enable_gqa=True).max
    limit = float(exact.sort().values[-2])
    buffer = torch.full((4, HEADS + 2), -torch.inf, device="cuda")
    buffer[:, -2], buffer[:, -1] = limit, 0.0
    over = exact > limit
    for number in (0, 2, 0, 2, 0):  # the first run of a row is recorded, the others are replayed
        probe_max(query, key, None, mask, None, buffer, "-", False, False, 0.3, number)
        found = buffer[number, :HEADS]
        torch.testing.assert_close(found[over].double(), exact[over].double(), rtol=1e-4, atol=1e-4)
    assert buffer[:, -1].tolist() == [3, 0, 2, 0]
    assert (buffer[1::2, :HEADS] == -torch.inf).all()
    again = query.clone()
    again[:, 1] *= 3
    probe_max(again, key, None, mask, None, buffer, "-", False, False, 0.3, 0)
    torch.testing.assert_close(buffer[0, 1].double(), 3 * exact[1].double(), rtol=1e-2, atol=1e-4)  # bfloat16 rounds
