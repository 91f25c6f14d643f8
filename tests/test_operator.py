"""attention() against SDPA at the same dtype and against the float64 reference, over shapes, masks and rules."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from attnscale import attention, attention_varlen, attention_weights, attention_with_stats, reference, rules
from attnscale.attending import row_blocks
from attnscale.rules import RULES

from .precision import assert_as_exact_as_sdpa, assert_same, worst
from .rules.oracle import EXAMPLES

batch, heads, q_len, kv_len, head_dim, value_dim = 2, 3, 5, 7, 11, 13


def tensors(dtype=torch.float32, kv_heads=heads, value_dim=value_dim):
    return (
        torch.randn(batch, heads, q_len, head_dim, dtype=dtype),
        torch.randn(batch, kv_heads, kv_len, head_dim, dtype=dtype),
        torch.randn(batch, kv_heads, kv_len, value_dim, dtype=dtype),
    )


def numpy(tensor):
    return tensor.detach().double().numpy()


def causal(q_len, kv_len):
    return np.tril(np.ones((q_len, kv_len), dtype=bool))


sizes = st.sampled_from([1, 2, 3, 5, 7, 17, 33])


@st.composite
def problems(draw):
    """A query, key, value and mask that fit together: distinct sizes, size one, empty rows, groups, any layout."""
    rank = draw(st.sampled_from([2, 3, 4, 5]))
    lead = tuple(draw(st.sampled_from([1, 2, 3])) for _ in range(max(rank - 3, 0)))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    group = draw(st.sampled_from([1, 1, 2, 4])) if rank > 2 else 1
    q_len, kv_len = draw(st.one_of(st.just(0), sizes)), draw(sizes)
    head_dim, value_dim = draw(sizes), draw(sizes)
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def tensor(heads, length, width):
        shape = (*lead, heads, length, width) if rank > 2 else (length, width)
        made = torch.randn(shape, generator=generator, dtype=torch.float64)
        if draw(st.booleans()):  # rows that are not contiguous
            made = torch.randn((*shape[:-2], width, length), generator=generator, dtype=torch.float64).mT
        return made.to(dtype)

    query, key, value = (
        tensor(kv_heads * group, q_len, head_dim),
        tensor(kv_heads, kv_len, head_dim),
        tensor(kv_heads, kv_len, value_dim),
    )
    kind = draw(st.sampled_from(["none", "causal", "bool", "float"]))
    mask = None
    if kind in ("bool", "float"):
        full = (*query.shape[:-2], q_len, kv_len)
        kept = draw(st.integers(2, len(full)))
        shape = [draw(st.sampled_from([1, size])) if i < len(full) - 1 else size for i, size in enumerate(full)][-kept:]
        mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.9]))
        if kind == "float":
            mask = torch.randn(shape, generator=generator).masked_fill(~mask, -math.inf).to(dtype)
    return query, key, value, mask, kind == "causal", group


def expected_output(query, key, value, mask, is_causal, group, scale=None, softcap=None):
    key, value = (numpy(x).repeat(group, axis=-3) if group > 1 else numpy(x) for x in (key, value))
    if is_causal:
        mask = causal(query.shape[-2], key.shape[-2])
    elif mask is not None:
        mask = mask.numpy() if mask.dtype == torch.bool else numpy(mask)
    return reference.scaled_dot_product_attention(numpy(query), key, value, scale=scale, mask=mask, softcap=softcap)


@given(problems(), st.sampled_from([None, 0.3, 1.0]))
def test_attention_is_sdpa_for_the_arguments_they_share(problem, scale):
    query, key, value, mask, is_causal, group = problem
    ours = attention(query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=group > 1)
    sdpa = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=group > 1
    )
    assert (ours.dtype, ours.shape, ours.device) == (sdpa.dtype, sdpa.shape, sdpa.device)
    assert_as_exact_as_sdpa(ours, sdpa, expected_output(*problem, scale=scale)[0])


@given(problems(), st.sampled_from([0.7, 30.0]))
def test_softcapped_attention_is_the_reference(problem, softcap):
    query, key, value, mask, is_causal, group = problem
    ours = attention(query, key, value, mask, is_causal=is_causal, enable_gqa=group > 1, softcap=softcap)
    sdpa = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=group > 1)
    expected = expected_output(*problem, softcap=softcap)[0]
    assert ours.shape == sdpa.shape
    plain = expected_output(*problem)[0]
    assert worst(ours, expected) <= 2 * worst(sdpa, plain) + 2 * torch.finfo(ours.dtype).eps * np.abs(expected).max(
        initial=1.0
    )


@given(problems(), st.sampled_from([None, 0.7]))
def test_weights_are_the_reference(problem, softcap):
    query, key, _, mask, is_causal, group = problem
    ours = attention_weights(query, key, mask, is_causal, enable_gqa=group > 1, softcap=softcap)
    expected = expected_output(*problem, softcap=softcap)[1]
    assert ours.dtype == query.dtype
    np.testing.assert_allclose(numpy(ours), expected, atol=4 * torch.finfo(query.dtype).eps)


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [heads, 1])
@pytest.mark.parametrize("name", RULES)
def test_every_rule_runs_on_the_fused_kernels_as_exactly_as_sdpa(name, kv_heads, dtype, mask):
    query, key, value = tensors(dtype, kv_heads)
    rule = EXAMPLES[name].make(heads, kv_heads, head_dim)
    attn_mask = {"bool": torch.rand(q_len, kv_len) < 0.6, "float": torch.randn(q_len, kv_len).to(dtype)}.get(mask)
    group = heads // kv_heads
    ours = attention(query, key, value, attn_mask, is_causal=mask == "causal", scale=rule, enable_gqa=group > 1)

    seen = {"causal": causal(q_len, kv_len), "bool": numpy_mask(attn_mask)}.get(mask)
    visible = np.full((q_len, 1), kv_len) if seen is None else seen.sum(-1, keepdims=True)
    q, k, v = numpy(query), numpy(key).repeat(group, axis=1), numpy(value).repeat(group, axis=1)
    scores = EXAMPLES[name].scores(rule, q, k, visible)
    bias = numpy(attn_mask) if mask == "float" else (0.0 if seen is None else np.where(seen, 0.0, -np.inf))
    expected = reference.softmax(scores + bias) @ v

    # SDPA at its best: the rule's own tensors, scaled in float64 and rounded once
    scaled = rule(query.double(), key.double(), torch.from_numpy(visible))
    sdpa = F.scaled_dot_product_attention(
        scaled[0].to(dtype), scaled[1].to(dtype), value, attn_mask,
        is_causal=mask == "causal", scale=scaled[2], enable_gqa=group > 1,
    )  # fmt: skip
    assert_as_exact_as_sdpa(ours, sdpa, expected)


def numpy_mask(mask):
    return None if mask is None or mask.dtype != torch.bool else mask.numpy()


def test_a_scale_may_be_a_name_a_number_a_tensor_or_a_rule():
    query, key, value = tensors()
    expected = attention(query, key, value, scale=0.25)
    for scale in ("constant:0.25", rules.temperature(4.0), torch.tensor(0.25), torch.full((heads, 1, 1), 0.25)):
        torch.testing.assert_close(attention(query, key, value, scale=scale), expected)


def test_a_tensor_scale_multiplies_each_row_and_gets_a_gradient():
    query, key, value = tensors(torch.float64)
    scale = torch.rand(batch, heads, q_len, 1, dtype=torch.float64, requires_grad=True)
    ours = attention(query, key, value, scale=scale)
    expected, _ = reference.scaled_dot_product_attention(numpy(query), numpy(key), numpy(value), scale=numpy(scale))
    np.testing.assert_allclose(numpy(ours), expected, atol=1e-12)
    assert torch.autograd.gradcheck(lambda s: attention(query, key, value, scale=s), (scale,))


def test_a_rule_of_ones_own_is_given_the_visible_keys():
    query, key, value = tensors()
    seen = {}

    def spy(query, key, visible=None):
        seen["visible"] = visible
        return query, key, 1.0

    attention(query, key, value, is_causal=True, scale=spy)
    assert seen["visible"].tolist() == [1, 2, 3, 4, 5]
    attention(query, key, value, torch.ones(q_len, kv_len, dtype=torch.bool).tril(1), scale=spy)
    assert seen["visible"].tolist() == [2, 3, 4, 5, 6]
    bias = torch.zeros(batch, 1, 1, kv_len)
    bias[1, ..., 4:] = -math.inf
    attention(query, key, value, bias, scale=spy)
    assert seen["visible"].flatten().tolist() == [7, 4]
    attention(query, key, value, scale=spy)
    assert seen["visible"] is None


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_gradients_are_right(mask, softcap):
    query, key, value = (tensor.requires_grad_() for tensor in tensors(torch.float64, kv_heads=1))
    bias = torch.randn(1, heads, q_len, kv_len, dtype=torch.float64, requires_grad=True) if mask == "float" else None
    visible = torch.rand(q_len, kv_len) < 0.6
    visible[2] = False  # a row that sees nothing has gradient zero, not NaN

    def run(query, key, value, bias=None):
        return attention(
            query, key, value, visible if mask == "bool" else bias,
            is_causal=mask == "causal", enable_gqa=True, softcap=softcap,
        )  # fmt: skip

    inputs = (query, key, value) if bias is None else (query, key, value, bias)
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_hidden_keys_stay_hidden_under_a_scale_of_zero_or_below(scale):
    """SDPA's kernel for CPUs gives NaN with its causal flag, in torch 2.11 to 2.13: it hides before it scales."""
    inputs = [torch.randn(batch, heads, q_len, head_dim, requires_grad=True) for _ in range(3)]
    expected = F.scaled_dot_product_attention(*inputs, torch.ones(q_len, q_len, dtype=torch.bool).tril(), scale=scale)
    for output in (
        attention(*inputs, is_causal=True, scale=scale),
        attention_with_stats(*inputs, is_causal=True, scale=scale)[0],
        attention_varlen(
            *(x[0].transpose(0, 1) for x in inputs), torch.tensor([0, q_len]), is_causal=True, scale=scale
        ).transpose(0, 1),
    ):
        assert_same(output, expected if output.dim() == 4 else expected[0], inputs, retain_graph=True)


def test_dropout_draws_what_sdpa_draws():
    query, key, value = tensors()
    torch.manual_seed(3)
    ours = attention(query, key, value, dropout_p=0.4)
    torch.manual_seed(3)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(query, key, value, dropout_p=0.4))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_dropout_over_many_blocks_keeps_the_mean_and_its_own_backward(softcap):
    rows = 2 * row_blocks.BLOCK_ROWS + 3
    query = torch.randn(1, 1, rows, 4, dtype=torch.float64)
    key, value = torch.randn(1, 1, 5, 4, dtype=torch.float64), torch.eye(5, dtype=torch.float64)[None, None]
    value.requires_grad_()
    plain = attention(query, key, value, softcap=softcap)
    dropped = attention(query, key, value, dropout_p=0.25, softcap=softcap)
    kept = dropped > 0
    torch.testing.assert_close(dropped[kept], (plain / 0.75)[kept])
    assert kept.double().mean().item() == pytest.approx(0.75, abs=4.5 * math.sqrt(0.75 * 0.25 / kept.numel()))
    # the backward pass draws the same keys again: with V = I, ∂ΣO/∂V_jj is the sum of column j of the weights
    grad = torch.autograd.grad(dropped.sum(), value)[0]
    torch.testing.assert_close(grad[0, 0, :, 0], dropped.sum(-2)[0, 0])


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("scale", [None, "calibrated", "log_length"])
def test_autocast_gives_what_sdpa_gives(scale, softcap):
    query, key, value = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        ours = attention(query, key.bfloat16(), value, scale=scale, softcap=softcap)
        sdpa = F.scaled_dot_product_attention(query, key.bfloat16(), value)
    assert ours.dtype == sdpa.dtype == torch.bfloat16
    exact = attention(query, key.bfloat16().float(), value, scale=scale, softcap=softcap)
    torch.testing.assert_close(ours.float(), exact, atol=0.04, rtol=0.04)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # SDPA's own, under vmap
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 2.0},
        {"scale": "calibrated"},
        {"scale": "log_length", "is_causal": True},
        {"attn_mask": torch.rand(q_len, kv_len) < 0.6 + torch.eye(q_len, kv_len)},
    ],
)
def test_vmap_and_func_grad_go_through(options):
    many = [torch.stack([tensor, 2 * tensor, -tensor]) for tensor in tensors()]
    mapped = torch.vmap(lambda *qkv: attention(*qkv, **options))(*many)
    one_by_one = torch.stack([attention(*qkv, **options) for qkv in zip(*many, strict=True)])
    torch.testing.assert_close(mapped, one_by_one)
    query, key, value = tensors()
    grad = torch.func.grad(lambda q: attention(q, key, value, **options).square().sum())(query)
    query.requires_grad_()
    expected = torch.autograd.grad(attention(query, key, value, **options).square().sum(), query)[0]
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scale", [None, 0.2, "inverse_dim", "calibrated", "log_length", "yarn:4", "tensor", "QKNorm"])
def test_compiles_into_one_graph_with_gradients(scale, softcap):
    inputs = [tensor.requires_grad_() for tensor in tensors()]
    scale = {"tensor": torch.rand(heads, 1, 1), "QKNorm": rules.QKNorm(head_dim, heads)}.get(scale, scale)

    def run(query, key, value):
        return attention(query, key, value, is_causal=True, scale=scale, softcap=softcap)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*inputs), run(*inputs), inputs)


@pytest.mark.parametrize("where", ["query", "key"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_behave_as_in_sdpa(poison, where):
    query, key, value = tensors(value_dim=head_dim)
    (query if where == "query" else key)[0, 1, 2, 3] = poison
    for is_causal in (False, True):
        ours = attention(query, key, value, is_causal=is_causal)
        sdpa = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        torch.testing.assert_close(ours, sdpa, equal_nan=True)


def test_fully_masked_rows_give_zeros():
    query, key, value = tensors()
    nothing = torch.zeros(q_len, kv_len, dtype=torch.bool)
    for softcap in (None, 2.0):
        assert attention(query, key, value, nothing, softcap=softcap).abs().max() == 0
    assert attention_weights(query, key, nothing).abs().max() == 0


def test_groups_of_rows_without_a_key_give_zeros():
    query, key = torch.randn(1, 4, 3, 5), torch.randn(1, 2, 0, 5)
    for softcap in (None, 2.0):
        assert attention(query, key, key, enable_gqa=True, softcap=softcap).abs().sum() == 0


def test_batches_and_single_heads_broadcast():
    query, key, value = tensors()
    ours = attention(query, key[:1, :1], value[:1, :1])
    torch.testing.assert_close(ours, attention(query, key[:1, :1].expand_as(key), value[:1, :1].expand_as(value)))
    rank_two = attention(query, key[0, 0], value[0, 0])
    torch.testing.assert_close(rank_two, ours)


def test_key_and_value_groups_of_two_sizes():
    query, key, value = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 2, 7, 8)
    torch.testing.assert_close(
        attention(query, key, value, enable_gqa=True),
        F.scaled_dot_product_attention(query, key, value, enable_gqa=True),
    )


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"scale": "calibrated"}])
def test_meta_tensors_give_shapes(options):
    query, key, value = (tensor.to("meta") for tensor in tensors())
    assert attention(query, key, value, **options).shape == (batch, heads, q_len, value_dim)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_in_torchscript_it_is_sdpa():
    query, key, value = tensors()
    scripted = torch.jit.script(_scripted)
    torch.testing.assert_close(scripted(query, key, value, 0.3), attention(query, key, value, scale=0.3))


def _scripted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float):
    return attention(query, key, value, None, 0.0, False, scale=scale)
