"""Attention with exact statistics on a CUDA device: its kernels, its gradients, and the operator around them."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from attnscale import attention_with_stats, reference, score_stats
from attnscale.measure.attending import attention_rows
from attnscale.measure.cuda import sdpa as fused
from attnscale.torch_internals import sdpa_backward

from ..precision import assert_as_exact_as_sdpa, worst
from .oracle import assert_rows, assert_stats, expected_rows

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's own, which differ from version to version
]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])


def score_rows(*given):
    """The sums of every row; triton is imported on a GPU only."""
    from attnscale.measure.cuda import rows

    return rows.score_rows(*given)[:7]


def qkv(device, dtype=torch.float32, heads=6, kv_heads=2, q_len=13, kv_len=17, head_dim=16, grad=False, batch=2):
    shapes = (heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, head_dim)
    return tuple(torch.randn(batch, *shape, device=device, dtype=dtype, requires_grad=grad) for shape in shapes)


def scores(query, key, scale, is_causal, rows=slice(None)):
    """In float64, −∞ where hidden."""
    q = query[:, :, rows].detach().double().cpu().numpy()
    k = key.detach().double().cpu().numpy().repeat(query.shape[1] // key.shape[1], axis=1)
    mask = np.arange(k.shape[-2]) <= np.arange(query.shape[-2])[rows][:, None] if is_causal else None
    return reference.attention_scores(q, k, scale, mask)


def sdpa(query, key, value, scale, is_causal):
    """SDPA by its own formula where groups or uneven lengths would leave its fused kernels."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)


def test_gradients_are_the_same_where_torch_has_no_backward_of_its_own():
    query, key, value = qkv("cpu", q_len=13, kv_len=17, kv_heads=6)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=0.3)
    grad = torch.randn_like(output)
    found = fused._recomputed(fused.Pass(grad, query, key, value, output, lse, 0.3, True))
    wanted = fused.attention_rows_backward(grad, query, key, value, output, lse, 0.3, True)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", fused.BACKWARDS)
def test_every_cuda_backward_is_called_as_this_torch_declares_it(backend):
    query, key, value = qkv("meta", torch.bfloat16, q_len=13, kv_len=13)
    lse = torch.empty(query.shape[:3], device="meta")
    kernel = sdpa_backward(backend, "cuda")
    gradients = fused.BACKWARDS[backend](kernel, fused.Pass(query, query, key, value, query, lse, 0.3, True))
    assert [x.shape for x in gradients] == [x.shape for x in (query, key, value)]


def transposed(*tensors):
    """(batch, length, heads, head_dim) in memory, as projections leave them."""
    return tuple(x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors)


@on_gpu
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_the_operator_passes_opcheck_and_its_fake_has_the_strides_of_the_real_one(layout, device):
    tensors = qkv(device, torch.bfloat16, head_dim=16, q_len=23, kv_len=23, grad=True)
    tensors = transposed(*tensors) if layout == "transposed" else tensors
    utils = "test_schema", "test_autograd_registration", "test_faketensor"  # the others find NaN unlike NaN
    torch.library.opcheck(attention_rows, (*tensors, 0.3, True), test_utils=utils)
    wanted = attention_rows(*tensors, 0.3, True)
    with FakeTensorMode() as mode:
        found = attention_rows(*(mode.from_tensor(x) for x in tensors), 0.3, True)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


@on_gpu
def test_statistics_and_gradients_compile_in_one_graph(device):
    def run(query, key, value):
        output, stats = attention_with_stats(query * 1.5, key, value, scale=0.3, is_causal=True, enable_gqa=True)
        return output.square().sum(), stats.entropy, score_stats(query, key, is_causal=True, enable_gqa=True).entropy

    compiled = torch.compile(run, fullgraph=True)
    for q_len in (13, 29, 31):  # the second makes the length symbolic
        tensors = qkv(device, q_len=q_len, grad=True)
        found, wanted = compiled(*tensors), run(*tensors)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        gradients = [torch.autograd.grad(result[0], tensors) for result in (found, wanted)]
        torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_a_cpu_needs_no_triton():
    code = """
import sys
sys.modules["triton"] = None
import torch
from attnscale import attention_with_stats
print(attention_with_stats(*torch.zeros(3, 1, 1, 2, 4), is_causal=True)[1].top1.tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[0.75]"


SIZES = [(1, 1), (1, 63), (63, 63), (200, 200), (200, 71), (131, 1000), (1000, 1000)]
TOLERANCE = 2e-5  # whatever the dtype: the products of what was given are accumulated in float32


@on_gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        (torch.bfloat16, 11),
        (torch.bfloat16, 64),
        (torch.bfloat16, 128),
        (torch.bfloat16, 256),
        (torch.float16, 64),
        (torch.float32, 16),
        (torch.float32, 96),
    ],
)
def test_the_kernel_is_as_exact_as_sdpa(device, dtype, head_dim, is_causal):
    scale = 1.5 * head_dim**-0.5
    for q_len, kv_len in SIZES:
        query, key, value = qkv(device, dtype, q_len=q_len, kv_len=kv_len, head_dim=head_dim)
        exact = scores(query, key, scale, is_causal)
        options = {"scale": scale, "is_causal": is_causal, "enable_gqa": True}
        output, stats = attention_with_stats(query, key, value, **options)
        alone = score_stats(query, key, **options)
        assert_stats(stats, exact, 5e-5, 5e-5)
        assert_stats(alone, exact, 5e-5, 5e-5)
        assert_rows(score_rows(query, key, scale, is_causal), expected_rows(exact), TOLERANCE)
        exact = reference.softmax(exact) @ value.double().cpu().numpy().repeat(3, axis=1)
        assert_as_exact_as_sdpa(output, sdpa(query, key, value, scale, is_causal), exact)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
def test_constant_and_one_hot_rows_are_exact_on_a_gpu(device, is_causal, dtype):
    query, key, value = qkv(device, dtype, q_len=613, kv_len=1021, head_dim=64)
    visible = torch.arange(1.0, 614.0) if is_causal else torch.full((613,), 1021.0)
    options = {"is_causal": is_causal, "enable_gqa": True}
    _, stats = attention_with_stats(query, key[:, :, :1].expand_as(key).contiguous(), value, scale=0.3, **options)
    rounding = {"rtol": 1e-6, "atol": 1e-6}  # the Hopper kernel scales and shifts a score in one instruction
    torch.testing.assert_close(stats.effective_keys.cpu(), visible.double().mean().expand(6), **rounding)
    torch.testing.assert_close(stats.entropy.cpu(), visible.double().log().mean().expand(6), **rounding)
    torch.testing.assert_close(stats.top1.cpu(), (1 / visible.double()).mean().expand(6), **rounding)
    key = F.normalize(key.float(), dim=-1).to(dtype)
    _, stats = attention_with_stats(key, key, value, scale=1e4)
    for found, wanted in ((stats.top1, 1.0), (stats.entropy, 0.0), (stats.effective_keys, 1.0)):
        torch.testing.assert_close(found, torch.full_like(found, wanted), rtol=2e-3, atol=2e-3)


GPU_OPTIONS = {
    "plain": dict(heads=4, kv_heads=4, q_len=211, kv_len=211, head_dim=64),
    "groups": dict(q_len=211, kv_len=211, head_dim=128),
    "odd head_dim": dict(q_len=67, kv_len=67, head_dim=11),
    "wide head_dim": dict(q_len=67, kv_len=67, head_dim=256),
    "more queries than keys": dict(q_len=197, kv_len=71, head_dim=64),
    "more keys than queries": dict(q_len=71, kv_len=197, head_dim=64),
    "one query": dict(q_len=1, kv_len=197, head_dim=64),
    "one key": dict(q_len=197, kv_len=1, head_dim=64),
}


@on_gpu
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize(
    ("dtype", "options", "is_causal"),
    [
        *((torch.bfloat16, options, True) for options in GPU_OPTIONS),
        (torch.bfloat16, "plain", False),
        (torch.float16, "groups", False),
        (torch.float32, "groups", True),
        (torch.float32, "odd head_dim", False),
    ],
)
def test_gradients_on_a_gpu_are_as_exact_as_sdpas(device, dtype, options, is_causal, layout):
    tensors = qkv(device, dtype, grad=True, **GPU_OPTIONS[options])
    tensors = transposed(*tensors) if layout == "transposed" else tensors
    exact = [x.detach().double().requires_grad_() for x in tensors]
    output = attention_rows(*tensors, 0.2, is_causal)[0]
    direction = torch.randn_like(output)
    found = torch.autograd.grad(output, tensors, direction)
    theirs = torch.autograd.grad(sdpa(*tensors, 0.2, is_causal), tensors, direction)
    wanted = torch.autograd.grad(sdpa(*exact, 0.2, is_causal), exact, direction.double())
    for ours, other, true in zip(found, theirs, wanted, strict=True):
        if dtype == torch.float32:  # another backward than SDPA's own choice, at the rounding of its sums
            assert worst(ours, true.cpu().numpy()) < 1e-4
        else:
            assert_as_exact_as_sdpa(ours, other, true.cpu().numpy())


@on_gpu
def test_a_cuda_graph_replays_the_operators(device):
    tensors = qkv(device, torch.bfloat16, q_len=197, kv_len=211, head_dim=64)

    def run():
        return attention_rows(*tensors, 0.2, True)

    run()  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for tensor in tensors:
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.testing.assert_close(captured, run(), rtol=0, atol=0, equal_nan=True)


@on_gpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_65537_rows_are_as_exact_as_a_few(device, is_causal):
    length = 65537
    query, key, value = qkv(
        device, torch.bfloat16, batch=1, heads=2, kv_heads=1, q_len=length, kv_len=length, head_dim=64
    )
    output, stats = attention_with_stats(query, key, value, scale=0.125, is_causal=is_causal, enable_gqa=True)
    alone = score_stats(query, key, scale=0.125, is_causal=is_causal, enable_gqa=True)
    for name in ("mean", "std", "entropy", "top1", "effective_keys"):
        torch.testing.assert_close(getattr(stats, name), getattr(alone, name), rtol=1e-5, atol=1e-6)
    rows = [0, 1, 127, 128, 30011, length - 129, length - 2, length - 1]
    at = torch.tensor(rows, device=device)
    found = score_rows(query, key, 0.125, is_causal)[..., at]
    exact = scores(query, key, 0.125, is_causal, rows)
    assert_rows(found, expected_rows(exact), 5e-5)
    assert worst(output[:, :, at], reference.softmax(exact) @ value.double().cpu().numpy()) < 0.01


@on_gpu
@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_query_of_few_and_of_many_heads(device, kv_heads, is_causal):
    for batch in (1, 32):
        query, key, value = qkv(device, torch.bfloat16, 8, kv_heads, 1, 1031, 64, batch=batch)
        options = {"scale": 0.3, "is_causal": is_causal, "enable_gqa": True}
        exact = scores(query, key, 0.3, is_causal)
        output, stats = attention_with_stats(query, key, value, **options)
        assert_stats(stats, exact, 5e-5, 5e-5)
        alone = score_stats(query, key, **options)
        assert alone.exact
        assert_stats(alone, exact, 5e-5, 5e-5)
        assert_as_exact_as_sdpa(
            output,
            sdpa(query, key, value, 0.3, is_causal),
            reference.softmax(exact) @ value.double().cpu().numpy().repeat(8 // kv_heads, axis=1),
        )
