"""attention_rows and score_rows as operators: exact, differentiable, compiled; on a GPU, the kernels themselves."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from attnscale import reference
from attnscale.measure import ScoreStats
from attnscale.measure.cuda import backward
from attnscale.measure.cuda.attended import attended_rows
from attnscale.measure.cuda.attention_op import attention_rows
from attnscale.measure.cuda.row_ops import sample_rows, score_rows
from attnscale.measure.cuda.ways import way_of
from attnscale.measure.pooled import Table
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


def qkv(device, dtype=torch.float32, heads=6, kv_heads=2, q_len=13, kv_len=17, head_dim=16, grad=False, batch=2):
    shapes = (heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, head_dim)
    return tuple(torch.randn(batch, *shape, device=device, dtype=dtype, requires_grad=grad) for shape in shapes)


def of_each(query, rows):
    """These positions of every batch entry."""
    return torch.tensor(rows, device=query.device).repeat(len(query), 1)


def scores(query, key, scale, is_causal, rows=slice(None)):
    """In float64, −∞ where hidden."""
    q = query[:, :, rows].detach().double().cpu().numpy()
    k = key.detach().double().cpu().numpy().repeat(query.shape[1] // key.shape[1], axis=1)
    mask = np.arange(k.shape[-2]) <= np.arange(query.shape[-2])[rows][:, None] if is_causal else None
    return reference.attention_scores(q, k, scale, mask)


def exact_rows(query, key, scale, is_causal, rows=slice(None)):
    return expected_rows(scores(query, key, scale, is_causal, rows))


def sdpa(query, key, value, scale, is_causal):
    """SDPA by its own formula where groups or uneven lengths would leave its fused kernels."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)


def attended(query, key, value, scale, is_causal):
    """The output, and max, total, gap, participation and lse of each row, as the kernels leave them."""
    way = way_of(query, key, value, scale, is_causal)
    output, lse, sums = attended_rows(query, key, value, scale, is_causal, way)
    return output, torch.stack([*sums[:4], lse])


def assert_attended(found, wanted, tolerance):
    """The statistics beside an output: the first four of RowSums, and the lse."""
    assert_rows(found[:4], wanted, tolerance)
    lse = wanted["max"] + np.log(wanted["total"])
    assert worst(found[4], lse) <= tolerance * max(1.0, np.abs(lse).max())


CPU_TOLERANCE = {torch.float32: 4e-6, torch.float64: 1e-13}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", CPU_TOLERANCE)
def test_rows_on_a_cpu_are_those_of_the_full_matrix(dtype, is_causal):
    query, key, value = qkv("cpu", dtype)
    output, lse, table = attention_rows(query, key, value, 0.3, is_causal)
    tolerance = 10 * CPU_TOLERANCE[dtype]
    assert_stats(ScoreStats(6, True, Table(table)), scores(query, key, 0.3, is_causal), tolerance, tolerance)
    wanted = exact_rows(query, key, 0.3, is_causal)
    assert worst(lse, wanted["max"] + np.log(wanted["total"])) < tolerance
    assert output.dtype == lse.dtype == dtype
    weights = reference.softmax(scores(query, key, 0.3, is_causal))
    assert worst(output, weights @ value.double().numpy().repeat(3, axis=1)) < CPU_TOLERANCE[dtype]
    assert_rows(
        score_rows(query, key, None, None, 0.3, is_causal),
        exact_rows(query, key, 0.3, is_causal),
        CPU_TOLERANCE[dtype],
    )


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("device", DEVICES)
def test_sampled_rows_keep_their_own_prefix(device, index):
    query, key, _ = qkv(device, q_len=23, kv_len=19)
    rows = torch.tensor([22, 0, 7, 7], device=device, dtype=index)
    found = score_rows(query, key, None, rows, 0.3, True)
    assert_rows(found, exact_rows(query, key, 0.3, True, [22, 0, 7, 7]), 4e-6)


OPTIONS = {
    "plain": dict(heads=3, kv_heads=3),
    "groups": dict(),
    "odd head_dim": dict(head_dim=11),
    "more queries than keys": dict(q_len=19, kv_len=7),
    "one query": dict(q_len=1),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", CPU_TOLERANCE)
def test_gradients_on_a_cpu_are_those_of_sdpa(dtype, options, is_causal):
    tensors = qkv("cpu", dtype, grad=True, **OPTIONS[options])
    output, lse, table = attention_rows(*tensors, 0.3, is_causal)
    reference_output = sdpa(*tensors, 0.3, is_causal)
    direction = torch.randn_like(output)
    found = torch.autograd.grad(output, tensors, direction)
    wanted = torch.autograd.grad(reference_output, tensors, direction)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).abs().max() <= 10 * CPU_TOLERANCE[dtype]
    assert not lse.requires_grad
    assert not table.requires_grad


def test_gradients_are_the_same_where_torch_gives_no_backward_away():
    query, key, value = qkv("cpu", kv_heads=1, q_len=13, kv_len=17)
    output, lse, _ = attention_rows(query, key, value, 0.3, True)
    grad = torch.randn_like(output)
    found = backward._recomputed(backward.Pass(grad, query, key, value, output, lse, 0.3, True))
    wanted = backward.attention_rows_backward(grad, query, key, value, output, lse, 0.3, True)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_gradients_pass_gradcheck():
    tensors = qkv("cpu", torch.float64, batch=1, heads=2, kv_heads=1, q_len=3, kv_len=5, head_dim=2, grad=True)
    assert torch.autograd.gradcheck(lambda *x: attention_rows(*x, 0.7, True)[0], tensors)


@pytest.mark.parametrize("backend", backward.BACKWARDS)
def test_every_cuda_backward_is_called_as_this_torch_declares_it(backend):
    query, key, value = qkv("meta", torch.bfloat16, q_len=13, kv_len=13)
    lse = torch.empty(query.shape[:3], device="meta")
    kernel = sdpa_backward(backend, "cuda")
    gradients = backward.BACKWARDS[backend](kernel, backward.Pass(query, query, key, value, query, lse, 0.3, True))
    assert [x.shape for x in gradients] == [x.shape for x in (query, key, value)]


@pytest.mark.parametrize("device", DEVICES)
def test_an_expanded_gradient_is_as_good_as_any(device):
    tensors = qkv(device, grad=True)
    found = torch.autograd.grad(attention_rows(*tensors, 0.3, True)[0].sum(), tensors)
    wanted = torch.autograd.grad(sdpa(*tensors, 0.3, True).sum(), tensors)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def transposed(*tensors):
    """(batch, length, heads, head_dim) in memory, as projections leave them."""
    return tuple(x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_attention_rows_passes_opcheck(layout, device):
    tensors = qkv(device, grad=True)
    tensors = transposed(*tensors) if layout == "transposed" else tensors
    torch.library.opcheck(attention_rows, (*tensors, 0.3, True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampled", [False, True])
def test_score_rows_passes_opcheck(sampled, device):
    query, key, _ = qkv(device)
    lse = torch.from_numpy(np.log(np.exp(scores(query, key, 0.3, True)).sum(-1))).float().to(device)
    rows = torch.tensor([0, 5, 12], device=device) if sampled else None
    torch.library.opcheck(score_rows, (query, key, lse, rows, 0.3, True))


@pytest.mark.parametrize("bounds", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_sample_rows_passes_opcheck(device, bounds):
    query, key, _ = qkv(device, kv_len=211)
    rows = of_each(query, [0, 5, 12])
    torch.library.opcheck(sample_rows, (query, key, rows, 0.3, True, bounds))


def test_statistics_alone_have_no_gradient():
    query, key, _ = qkv("cpu", grad=True)
    assert not score_rows(query, key, None, None, 0.3, True).requires_grad
    assert not any(tensor.requires_grad for tensor in sample_rows(query, key, of_each(query, [3]), 0.3, True, True))


@pytest.mark.parametrize("device", DEVICES)
def test_fakes_have_the_shapes_dtypes_and_strides_of_the_real_ones(device):
    real = transposed(*qkv(device, q_len=23, head_dim=11))
    rows = of_each(real[0], [3, 1])

    def run(tensors, rows):
        sampled = sample_rows(*tensors[:2], rows, 0.3, True, True)
        return *attention_rows(*tensors, 0.3, True), score_rows(*tensors[:2], None, rows[0], 0.3, True), *sampled

    wanted = run(real, rows)
    with FakeTensorMode() as mode:
        found = run([mode.from_tensor(x) for x in real], mode.from_tensor(rows))
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


@pytest.mark.parametrize(("device", "backend"), [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=gpu)])
def test_compiles_in_one_graph_with_its_gradients(device, backend):
    def run(query, key, value):
        output, _, table = attention_rows(query * 1.5, key, value, 0.3, True)
        sampled = sample_rows(query, key, rows, 0.3, True, True)
        return output.square().sum(), table, score_rows(query, key, None, None, 0.3, True), sampled

    rows = of_each(qkv(device)[0], [2, 11])
    compiled = torch.compile(run, fullgraph=True, backend=backend)
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
from attnscale.measure.cuda.attention_op import attention_rows
print(attention_rows(*torch.zeros(3, 1, 1, 2, 4), 0.5, True)[1].exp().round().tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[[[1.0, 2.0]]]"


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
        output, found = attended(query, key, value, scale, is_causal)
        assert_attended(found, exact_rows(query, key, scale, is_causal), TOLERANCE)
        weights = reference.softmax(scores(query, key, scale, is_causal))
        exact = weights @ value.double().cpu().numpy().repeat(3, axis=1)
        assert_as_exact_as_sdpa(output, sdpa(query, key, value, scale, is_causal), exact)


@on_gpu
@pytest.mark.parametrize("given_lse", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float32, 11)])
def test_score_rows_on_a_gpu_are_those_of_the_full_matrix(device, dtype, head_dim, sampled, given_lse):
    scale = head_dim**-0.5
    for q_len, kv_len in SIZES:
        query, key, value = qkv(device, dtype, q_len=q_len, kv_len=kv_len, head_dim=head_dim)
        lse = attention_rows(query, key, value, scale, True)[1]
        rows = torch.randperm(q_len)[: 1 + q_len // 8]
        found = score_rows(query, key, lse if given_lse else None, rows.to(device) if sampled else None, scale, True)
        kept = rows.numpy() if sampled else slice(None)
        assert_rows(found, exact_rows(query, key, scale, True, kept), TOLERANCE)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
def test_constant_and_one_hot_rows_are_exact_on_a_gpu(device, is_causal, dtype):
    query, key, value = qkv(device, dtype, q_len=613, kv_len=1021, head_dim=64)
    visible = torch.arange(1.0, 614.0, device=device) if is_causal else torch.full((613,), 1021.0, device=device)
    _, (_, total, gap, participation, _) = attended(query, key[:, :, :1].expand_as(key), value, 0.3, is_causal)
    rounding = {"rtol": 1e-6, "atol": 1e-6}  # the Hopper kernel scales and shifts a score in one instruction
    torch.testing.assert_close(total, visible.expand_as(total), **rounding)
    torch.testing.assert_close(gap, torch.zeros_like(gap), **rounding)
    torch.testing.assert_close(participation, (1 / visible).expand_as(participation), **rounding)
    key = F.normalize(key.float(), dim=-1).to(dtype)
    _, (_, total, gap, participation, _) = attended(key, key, value, 1e4, False)
    assert (total >= 1).all()
    assert (participation <= 1).all()
    for found, wanted in ((total, 1.0), (gap, 0.0), (participation, 1.0)):
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
    rows = of_each(tensors[0], [3, 150])

    def run():
        sampled = sample_rows(*tensors[:2], rows, 0.2, True, True)
        return *attention_rows(*tensors, 0.2, True), score_rows(*tensors[:2], None, rows[0], 0.2, True), *sampled

    run()  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for tensor in tensors:
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    assert all(map(torch.equal, captured, run()))


@on_gpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_65537_rows_are_as_exact_as_a_few(device, is_causal):
    length = 65537
    query, key, value = qkv(
        device, torch.bfloat16, batch=1, heads=2, kv_heads=1, q_len=length, kv_len=length, head_dim=64
    )
    output, found = attended(query, key, value, 0.125, is_causal)
    assert output.isfinite().all()
    assert found.isfinite().all()
    rows = [0, 1, 127, 128, 30011, length - 129, length - 2, length - 1]
    at = torch.tensor(rows, device=device)
    wanted = exact_rows(query, key, 0.125, is_causal, rows)
    assert_attended(found[..., at], wanted, 5e-5)
    assert_rows(score_rows(query, key, None, at, 0.125, is_causal), wanted, 5e-5)
    exact = reference.softmax(scores(query, key, 0.125, is_causal, rows)) @ value.double().cpu().numpy()
    assert worst(output[:, :, at], exact) < 0.01
