"""Merging: order-free, exact to float64 rounding, over batches, heads, keys and ranks."""

import math
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from attnscale import score_stats
from attnscale.measure.pooled import pack, unpack
from attnscale.measure.stats import ScoreStats
from tests.ranks import on_ranks

from .oracle import NAMES


def assert_same(left, right, rtol=1e-12):
    for name in NAMES:
        torch.testing.assert_close(getattr(left, name), getattr(right, name), rtol=rtol, atol=1e-13, equal_nan=True)
    assert left.rows.tolist() == right.rows.tolist()
    assert left.count.tolist() == right.count.tolist()


def test_merging_is_associative_and_order_free():
    parts = [
        score_stats(torch.randn(1, 2, n, 8, dtype=torch.float64) + n, torch.randn(1, 2, 11, 8, dtype=torch.float64))
        for n in (3, 5, 7)
    ]
    a, b, c = parts
    assert_same((a + b) + c, a + (b + c))
    assert_same(a + b + c, c + a + b)


@pytest.mark.parametrize(("rows", "count"), [(None, 1000), (4, 200)])
def test_many_shards_lose_no_more_than_rounding(rows, count):
    torch.manual_seed(1)
    query = torch.randn(count, 2, 8, 4, dtype=torch.float64) + 3
    key = torch.randn(count, 2, 9, 4, dtype=torch.float64) + 5
    shards = [score_stats(query[i : i + 1], key[i : i + 1], rows=rows) for i in range(count)]
    merged = sum(shards[1:], shards[0])
    backwards = sum(shards[-2::-1], shards[-1])
    assert_same(merged, backwards, rtol=1e-11)
    if rows is None:
        assert_same(merged, score_stats(query, key), rtol=1e-11)
    else:
        for name in ("variance", "jacobian_trace", "saturated"):
            torch.testing.assert_close(merged.stderr(name), backwards.stderr(name), rtol=1e-8, atol=0)


def test_what_ranks_send_each_other_holds_every_error():
    stats = score_stats(torch.randn(1, 2, 97, 8), torch.randn(1, 2, 97, 8), is_causal=True, rows=41)
    sent = stats.pooled
    received = unpack(pack(sent))()
    torch.testing.assert_close(received.uncertainty.covariance, sent.uncertainty.covariance, rtol=0, atol=0)
    again = ScoreStats(2, exact=False, pool=lambda: received)
    for name in ("mean", "variance", "entropy", "saturated", "jacobian_trace"):
        torch.testing.assert_close(again.stderr(name), stats.stderr(name))


def _rank(rank, world, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    query, key = _whole()
    mine = slice(0, 0) if rank == world - 1 else slice(2 * rank, 2 * rank + 2)  # the last rank saw no rows
    merged = score_stats(query[mine], key[mine], is_causal=True).all_reduce()
    if rank == 0:
        results.update(merged.to_dict())
    dist.destroy_process_group()


def _whole():
    generator = torch.Generator().manual_seed(5)
    return (torch.randn(4, 2, 9, 8, generator=generator, dtype=torch.float64) for _ in range(2))


@pytest.mark.filterwarnings("default")
def test_ranks_get_the_numbers_of_one_process_on_the_whole_batch():
    with mp.Manager() as manager:
        results = manager.dict()
        on_ranks(_rank, 3, 3, 29_517 + os.getpid() % 1000, results)
        found = dict(results)
    query, key = _whole()
    expected = score_stats(query, key, is_causal=True).to_dict()
    for name in (*NAMES, "rows", "count"):
        assert found[name] == pytest.approx(expected[name], rel=1e-12), name
    assert not any(math.isnan(value) for value in found["entropy"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("rows", [None, 16])
def test_a_single_rank_on_nccl_gets_its_own_numbers_back(rows):
    query, key = (torch.randn(2, 3, 257, 16, device="cuda") for _ in range(2))
    stats = score_stats(query, key, is_causal=True, rows=rows)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        merged = stats.all_reduce()
    finally:
        dist.destroy_process_group()
    assert merged.exact == stats.exact == (rows is None)
    assert_same(merged, stats)
    torch.testing.assert_close(merged.stderr("entropy"), stats.stderr("entropy"), equal_nan=True)
