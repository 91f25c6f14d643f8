"""attention() on a CUDA device: exactness, memory, compilation. Run with `make gpu`."""

import pytest
import torch
import torch.nn.functional as F

from attnscale import MultiheadAttention, attention, reference, rules
from attnscale.rules import RULES

from ..precision import assert_as_exact_as_sdpa, worst
from ..rules.oracle import EXAMPLES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's own, which differ from version to version
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def qkv(dtype, heads=4, kv_heads=4, q_len=197, kv_len=211, head_dim=64, value_dim=None):
    shapes = (heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, value_dim or head_dim)
    return tuple(torch.randn(2, *shape, device="cuda", dtype=dtype) for shape in shapes)


def masks(dtype, q_len=197, kv_len=211):
    visible = torch.rand(q_len, kv_len, device="cuda") < 0.6
    return {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": visible},
        "float": {"attn_mask": torch.randn(2, 1, q_len, kv_len, device="cuda", dtype=dtype)},
        "keys": {"attn_mask": torch.rand(2, 1, 1, kv_len, device="cuda") < 0.6},
    }


def expected(query, key, value, options, scale=None, softcap=None):
    group = query.shape[1] // key.shape[1]
    q, k, v = (x.detach().double().cpu().numpy() for x in (query, key, value))
    mask = options.get("attn_mask")
    if options.get("is_causal"):
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    if mask is not None:
        mask = mask.cpu().numpy() if mask.dtype == torch.bool else mask.double().cpu().numpy()
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    return reference.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, softcap=softcap)[0]


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "keys"])
@pytest.mark.parametrize(("kv_heads", "head_dim", "value_dim"), [(4, 64, 64), (2, 11, 13), (4, 40, 64), (1, 128, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_kernels_are_as_exact_as_sdpa(dtype, kv_heads, head_dim, value_dim, mask):
    tensors = qkv(dtype, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim)
    options = masks(dtype)[mask]
    gqa = kv_heads < 4
    ours = attention(*tensors, enable_gqa=gqa, **options)
    sdpa = F.scaled_dot_product_attention(*tensors, enable_gqa=gqa, **options)
    assert_as_exact_as_sdpa(ours, sdpa, expected(*tensors, options))


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "head_dim", "mask"),
    [
        (torch.bfloat16, 4, 64, "none"),
        (torch.bfloat16, 1, 128, "causal"),
        (torch.bfloat16, 4, 64, "keys"),
        (torch.float32, 2, 11, "causal"),
        (torch.float32, 2, 11, "bool"),
        (torch.float16, 2, 40, "float"),
    ],
)
def test_softcap_is_as_exact_as_sdpa_without_it(dtype, kv_heads, head_dim, mask):
    tensors = qkv(dtype, kv_heads=kv_heads, head_dim=head_dim)
    options = masks(dtype)[mask]
    gqa = kv_heads < 4
    sdpa = F.scaled_dot_product_attention(*tensors, scale=0.3, enable_gqa=gqa, **options)
    error = worst(sdpa, expected(*tensors, options, scale=0.3))
    ours = attention(*tensors, scale=0.3, softcap=3.0, enable_gqa=gqa, **options)
    exact = expected(*tensors, options, scale=0.3, softcap=3.0)
    assert worst(ours, exact) <= 2 * error + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("mask", ["causal", "bool"])
def test_softcap_gradients_are_those_of_the_blocks(mask):
    tensors = [tensor.requires_grad_() for tensor in qkv(torch.float32, kv_heads=2)]
    options = masks(torch.float32)[mask]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    found = torch.autograd.grad(attention(*tensors, softcap=2.0, enable_gqa=True, **options).square().sum(), tensors)
    wanted = torch.autograd.grad(attention(*exact, softcap=2.0, enable_gqa=True, **options).square().sum(), exact)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 1e-3


def test_softcap_serves_many_lengths_caps_and_widths_without_falling_back():
    for step in range(12):
        tensors = qkv(torch.bfloat16, q_len=130 + 37 * step, kv_len=300 + 11 * step)
        for options in ({}, {"is_causal": True}):
            ours = attention(*tensors, softcap=4.0, **options)
            assert worst(ours, expected(*tensors, options, softcap=4.0)) < 0.02
    for cap in range(5, 15):
        assert attention(*tensors, softcap=float(cap)).isfinite().all()


@pytest.mark.parametrize("name", RULES)
def test_every_rule_runs_on_the_gpu(name):
    heads, kv_heads, head_dim = 4, 2, 32
    query, key, value = qkv(torch.bfloat16, heads, kv_heads, head_dim=head_dim)
    rule = EXAMPLES[name].make(heads, kv_heads, head_dim)
    on_cpu = attention(query.cpu(), key.cpu(), value.cpu(), scale=rule, is_causal=True, enable_gqa=True)
    if isinstance(rule, torch.nn.Module):
        rule = rule.cuda()
    ours = attention(query, key, value, scale=rule, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ours.cpu(), on_cpu, atol=0.03, rtol=0.03)


CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.1},
    "groups": {"enable_gqa": True},
    "boolean mask": {"attn_mask": "bool"},
    "log_length": {"scale": "log_length", "is_causal": True},
    "calibrated": {"scale": "calibrated"},
    "softcap": {"softcap": 5.0},
    "softcap, causal": {"softcap": 5.0, "is_causal": True},
    "softcap, dropout": {"softcap": 5.0, "dropout_p": 0.1},
}


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.float32, 11), (torch.float64, 64)])
@pytest.mark.parametrize("case", CASES)
def test_memory_stays_linear_forward_and_backward(case, head_dim, dtype):
    length, heads = 6144, 8
    options = dict(CASES[case])
    kv_heads = 2 if options.get("enable_gqa") else heads
    if "attn_mask" in options:
        options["attn_mask"] = torch.rand(length, length, device="cuda") < 0.5

    def step():
        tensors = [
            torch.randn(1, count, length, head_dim, device="cuda", dtype=dtype, requires_grad=True)
            for count in (heads, kv_heads, kv_heads)
        ]
        attention(*tensors, **options).sum().backward()

    step()  # compile and autotune first
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    used = torch.cuda.max_memory_allocated() - before
    full = heads * length * length * torch.finfo(dtype).bits // 8
    assert used < full / 2, f"{used / full:.2f} of the full matrix"


@pytest.mark.parametrize(
    ("scale", "softcap"), [(None, 5.0), ("calibrated", None), ("log_length", None), ("QKNorm", 5.0)]
)
def test_compiles_into_one_graph(scale, softcap):
    tensors = [tensor.requires_grad_() for tensor in qkv(torch.bfloat16, q_len=256, kv_len=256)]
    rule = rules.QKNorm(64, 4).cuda() if scale == "QKNorm" else scale

    def run(*tensors):
        return attention(*tensors, is_causal=True, scale=rule, softcap=softcap)

    compiled = torch.compile(run, fullgraph=True)
    ours = compiled(*tensors)
    torch.testing.assert_close(ours, run(*tensors), atol=0.03, rtol=0.03)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(ours.sum(), tensors))


def test_autocast_with_softcap():
    tensors = qkv(torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        ours = attention(*tensors, softcap=5.0)
    assert ours.dtype == torch.bfloat16
    assert worst(ours, expected(*tensors, {}, softcap=5.0)) < 0.03


def test_multihead_attention_on_the_gpu():
    layer = MultiheadAttention(64, 4, batch_first=True, scale="QKNorm", device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 17, 64, device="cuda", dtype=torch.bfloat16)
    output, weights = layer(x, x, x)
    assert output.isfinite().all()
    torch.testing.assert_close(weights.float().sum(-1), torch.ones(2, 17, device="cuda"), atol=0.02, rtol=0.02)
