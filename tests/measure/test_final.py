"""Statistics are final when the call returns: what happens to query and key afterwards changes nothing."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch

from attnscale import attention_with_stats, score_stats
from attnscale.measure import attending, sampling
from attnscale.measure.cuda import sampled

from .oracle import NAMES
from .test_ops import DEVICES, on_gpu

batch, heads, length, head_dim = 2, 3, 131, 16
WAYS = {
    "with the output": lambda q, k, v, rows: attention_with_stats(q, k, v, is_causal=True, rows=rows)[1],
    "alone": lambda q, k, v, rows: score_stats(q, k, is_causal=True, rows=rows),
    "behind a mask": lambda q, k, v, rows: score_stats(
        q, k, attn_mask=torch.ones_like(q[:1, :1, :, :1]) > 0, rows=rows
    ),
}
measured = [
    pytest.mark.parametrize("rows", [None, 29]),
    pytest.mark.parametrize("way", WAYS),
    pytest.mark.parametrize("device", DEVICES),
]


def every(parameters):
    def mark(test):
        for each in parameters:
            test = each(test)
        return test

    return mark


def qkv(device, dtype=torch.float32):
    return [torch.randn(batch, heads, length, head_dim, device=device, dtype=dtype) for _ in range(3)]


def shown(stats):
    """Everything there is to read."""
    names = (*NAMES, "rows", "count", "max_bound", "keys")
    errors = [stats.stderr(name) for name in ("mean", "std", "entropy", "saturated")]
    untold = torch.stack(errors).nan_to_num(nan=-1.0)  # equal where neither is told
    return torch.cat([torch.stack([getattr(stats, name).double() for name in names]), untold])


WRITES = {
    "in place": lambda x: x.mul_(3.0),
    "through .data": lambda x: x.data.fill_(7.0),
    "through a view": lambda x: x[:, :, ::2].neg_(),
    "through memory": lambda x: x.untyped_storage().copy_(torch.zeros_like(x).untyped_storage()),
}


@pytest.mark.parametrize("write", WRITES)
@every(measured)
def test_later_writes_to_query_and_key_do_not_change_statistics(device, way, rows, write):
    tensors = qkv(device)
    stats, same = (_seeded(way, tensors, rows) for _ in range(2))
    wanted = shown(same)
    for tensor in tensors:
        WRITES[write](tensor)
    assert torch.equal(shown(stats), wanted)


def _seeded(way, tensors, rows):
    """Measure the same rows every time."""
    sampled.drawn_ahead.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "SOURCE", np.random.default_rng(7))
        return WAYS[way](*tensors, rows)


@every(measured)
def test_nothing_of_the_callers_is_kept(device, way, rows):
    tensors = qkv(device)
    stats = WAYS[way](*tensors, rows)
    kept = [weakref.ref(tensor) for tensor in tensors]
    stores = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    del tensors
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3
    assert [ref() for ref in stores] == [None] * 3
    assert shown(stats)[: len(NAMES)].isfinite().all()


@every(measured)
def test_inference_mode_measures_what_is_read_outside_it(device, way, rows):
    tensors = qkv(device)
    wanted = shown(_seeded(way, tensors, rows))
    with torch.inference_mode():
        stats = _seeded(way, [tensor.clone() for tensor in tensors], rows)
    torch.testing.assert_close(shown(stats), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close((stats + stats).entropy, stats.entropy)


@every(measured)
def test_statistics_are_pickled_and_copied_whole(device, way, rows):
    stats = WAYS[way](*qkv(device), rows)
    for twin in (pickle.loads(pickle.dumps(stats)), copy.deepcopy(stats)):
        assert (twin.heads, twin.exact) == (heads, rows is None)
        assert torch.equal(shown(twin), shown(stats))
        assert (twin + stats).rows.tolist() == [2 * number for number in stats.rows.tolist()]


@on_gpu
@pytest.mark.parametrize("rows", [None, 29])
@pytest.mark.parametrize("way", WAYS)
def test_a_replayed_graph_refreshes_them(device, way, rows):
    tensors = qkv(device, torch.bfloat16)
    for _ in range(3):
        WAYS[way](*tensors, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stats = WAYS[way](*tensors, rows)
    graph.replay()
    first = shown(stats)
    for tensor in tensors[:2]:
        tensor.copy_(2 * torch.randn_like(tensor))
    graph.replay()
    second = shown(stats)
    assert not torch.equal(first, second)
    exact = WAYS[way](*tensors, None)
    if rows is None:
        torch.testing.assert_close(second, shown(exact), rtol=1e-6, atol=1e-6)
    else:
        assert ((stats.entropy - exact.entropy).abs() <= 6 * stats.stderr("entropy") + 1e-5).all()


@on_gpu
@pytest.mark.parametrize("rows", [None, 29])
def test_autocast_changes_nothing_where_everything_is_bfloat16_already(device, rows, monkeypatch):
    tensors = qkv(device, torch.bfloat16)
    wanted = shown(_seeded("with the output", tensors, rows))
    seen = []
    kernel = attending._attend_by_kernel if rows is None else attending.measure_rows
    monkeypatch.setattr(attending, kernel.__name__, lambda *given: seen.append(1) or kernel(*given))
    with torch.autocast("cuda", torch.bfloat16):
        stats = _seeded("with the output", tensors, rows)
    assert seen == [1]
    torch.testing.assert_close(shown(stats), wanted, rtol=1e-6, atol=1e-6)


@on_gpu
def test_float32_is_measured_the_same_under_any_matmul_precision_of_torch(device):
    tensors = qkv(device)
    wanted = shown(attention_with_stats(*tensors)[1])
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert torch.equal(shown(attention_with_stats(*tensors)[1]), wanted)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@on_gpu
def test_compiled_code_reads_what_plain_code_reads(device):
    tensors = qkv(device, torch.bfloat16)
    output, stats = torch.compile(lambda q, k, v: attention_with_stats(q, k, v, is_causal=True))(*tensors)
    plain, wanted = attention_with_stats(*tensors, is_causal=True)
    torch.testing.assert_close(output, plain)
    torch.testing.assert_close(shown(stats), shown(wanted), rtol=1e-6, atol=1e-6)
