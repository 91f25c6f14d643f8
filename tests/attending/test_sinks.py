"""Attention with a learned logit in the denominator, against the float64 reference."""

from functools import partial

import pytest
import torch

from attnscale import (
    Visibility,
    attention,
    attention_varlen,
    attention_varlen_with_stats,
    attention_with_stats,
    rules,
    score_stats,
)
from attnscale.errors import ShapeError
from tests.others import OTHERS_MAY_WARN
from tests.precision import assert_same
from tests.ragged import Batch

pytestmark = OTHERS_MAY_WARN
batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim = 2, 6, 3, 13, 17, 11, 7
SINKS = torch.tensor([-3.0, -0.5, 0.0, 0.7, 2.0, 5.0])
BLIND = torch.rand(q_len, kv_len, generator=torch.Generator().manual_seed(0)) < 0.6
BLIND[3] = False  # a row that sees nothing but the sink
CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "booleans": {"attn_mask": BLIND},
    "numbers": {"attn_mask": torch.linspace(-2, 2, q_len * kv_len).view(q_len, kv_len).double()},
    "window": {"attn_mask": Visibility.causal(window=5, from_the_end=True)},
    "soft-cap": {"softcap": 1.5, "is_causal": True},
    "rule": {"scale": "log_length"},
    "negative scale": {"scale": -0.4, "is_causal": True},
}


def tensors(dtype=torch.float64, grad=True):
    shapes = (heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, value_dim)
    drawn = [torch.randn(batch, *shape).to(dtype).requires_grad_(grad) for shape in shapes]
    return [*drawn, SINKS.to(dtype).clone().requires_grad_(grad)]


def written_out(query, key, value, sinks, attn_mask=None, is_causal=False, scale=None, softcap=None):
    """Return the output, formed from the full matrix with one more column."""
    key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
    seen, added = torch.ones(q_len, kv_len, dtype=torch.bool), 0.0
    if isinstance(attn_mask, Visibility):
        seen = attn_mask.within(q_len, kv_len).shown(slice(0, q_len), slice(0, kv_len), "cpu")
    elif attn_mask is not None:
        seen, added = (attn_mask, 0.0) if attn_mask.dtype == torch.bool else (seen, attn_mask)
    rule = rules.constant(scale) if isinstance(scale, float) else rules.get_rule(scale or "inverse_sqrt")
    query, key, factor = rule(query, key)
    scores = query @ key.mT * factor
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = (scores + added).masked_fill(~(seen.tril() if is_causal else seen), -torch.inf)
    column = sinks[:, None, None].expand(batch, -1, q_len, 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_equal_a_softmax_with_one_more_column(case):
    inputs = tensors()
    ours = attention(*inputs[:3], sinks=inputs[3], enable_gqa=True, **CASES[case])
    assert_same(ours, written_out(*inputs, **CASES[case]), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["plain", "causal", "booleans", "window", "soft-cap"])
def test_the_error_is_the_rounding_of_the_dtype(case, dtype):
    inputs = tensors(dtype)
    ours = attention(*inputs[:3], sinks=inputs[3], enable_gqa=True, **CASES[case])
    exact = written_out(*(each.double() for each in inputs), **CASES[case])
    assert ours.dtype == dtype
    error = torch.finfo(dtype).eps * 16
    torch.testing.assert_close(ours.double(), exact, rtol=error, atol=error)
    grads = zip(*(torch.autograd.grad(each.sum(), inputs) for each in (ours, exact)), strict=True)
    for found, wanted in grads:
        torch.testing.assert_close(found.double(), wanted.double(), rtol=8 * error, atol=8 * error)


def test_second_derivatives_of_the_fused_kernel():
    inputs = [each[..., :3, :2] if each.dim() > 1 else each for each in tensors()]
    inputs = [each.detach().requires_grad_() for each in inputs]
    assert torch.autograd.gradgradcheck(
        lambda *t: attention(*t[:3], sinks=t[3], is_causal=True, enable_gqa=True), inputs
    )


@pytest.mark.parametrize("masked", [False, True])
def test_tensors_with_rows_that_are_not_contiguous_are_read_right(masked):
    inputs = tensors()
    turned = [each.detach().mT.contiguous().mT.requires_grad_() for each in inputs[:3]]
    mask = torch.randn(kv_len, q_len, dtype=torch.float64).T if masked else None
    for sinks in (inputs[3], None):  # without a sink, a query of three axes has the same kernel
        pair = [[each[0] for each in some] if sinks is None else some for some in (inputs[:3], turned)]
        outputs = [attention(*some, mask, sinks=sinks, enable_gqa=True) for some in pair]
        torch.testing.assert_close(*outputs)
        pairs = zip(outputs, (inputs[:3], turned), strict=True)
        torch.testing.assert_close(*(torch.autograd.grad(output.sin().sum(), some) for output, some in pairs))


def test_a_sink_of_minus_infinity_is_none_and_a_large_one_takes_everything():
    query, key, value, _ = tensors(grad=False)
    none = attention(query, key, value, sinks=torch.full((heads,), -torch.inf), enable_gqa=True, attn_mask=BLIND)
    torch.testing.assert_close(none, attention(query, key, value, enable_gqa=True, attn_mask=BLIND))
    assert attention(query, key, value, sinks=torch.full((heads,), 500.0), enable_gqa=True).abs().max() < 1e-100


@pytest.mark.parametrize("case", ["plain", "causal", "booleans", "window", "soft-cap"])
def test_sinks_compile_into_one_graph_with_gradients(case):
    inputs = tensors()

    def run(query, key, value, sinks):
        return attention(query, key, value, sinks=sinks, enable_gqa=True, **CASES[case]) * 2

    assert_same(torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs), run(*inputs), inputs)


@pytest.mark.parametrize("rows", [None, 11])
@pytest.mark.parametrize("case", ["plain", "causal", "booleans", "window", "soft-cap"])
def test_statistics_are_of_the_distribution_that_the_output_has(case, rows):
    inputs, options = tensors(), {"enable_gqa": True, **CASES[case]}
    output, stats = attention_with_stats(*inputs[:3], sinks=inputs[3], rows=rows, **options)
    torch.testing.assert_close(output, attention(*inputs[:3], sinks=inputs[3], **options))
    assert output.requires_grad
    if rows is None:
        alone = score_stats(*inputs[:2], sinks=inputs[3], **options)
        for name in ("entropy", "top1", "sink", "learned_sink", "jacobian_trace"):
            torch.testing.assert_close(getattr(stats, name), getattr(alone, name))
    # with values of one, the output is the weight that the keys are left with
    query, key, value, sinks = inputs
    left, stats = attention_with_stats(query, key, torch.ones_like(value), sinks=sinks, **options)
    seen = (left.sum(-1) > 0).double()
    share = 1 - (left.mean(-1) * seen).sum((0, 2)) / seen.sum((0, 2))
    torch.testing.assert_close(stats.learned_sink, share)


def test_transforms_of_torch_func_reach_the_sinks():
    query, key, value, sinks = tensors()

    def loss(sinks):
        return attention(query, key, value, sinks=sinks, enable_gqa=True).sin().sum()

    torch.testing.assert_close(torch.func.grad(loss)(sinks), torch.autograd.grad(loss(sinks), sinks)[0])


def test_sinks_of_packed_and_nested_sequences():
    *inputs, sinks = tensors()
    options = {"is_causal": True, "enable_gqa": True, "sinks": sinks}
    ragged = Batch(*(x[0, :, :q_len].transpose(0, 1) for x in inputs), [5, 0, 8], [5, 0, 8])
    output, stats = attention_varlen_with_stats(*ragged.tensors, ragged.starts[0], **options)
    nested = attention(*ragged.nested(), **options).transpose(1, 2).values()
    parts = [attention(*part, **options) for part in ragged.alone()]
    expected = torch.cat(parts, 2)[0].transpose(0, 1)
    packed = attention_varlen(*ragged.tensors, ragged.starts[0], **options)
    for ours in (packed, output, nested):
        assert_same(ours, expected, [sinks], retain_graph=True)
    assert (stats.learned_sink > 0).all()


def test_autocast_casts_attention_with_sinks():
    query, key, value, sinks = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = attention(query, key, value, sinks=sinks, enable_gqa=True)
    assert output.dtype == torch.bfloat16
    exact = written_out(query, key, value, sinks)
    torch.testing.assert_close(output.float(), exact, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("sinks", [torch.zeros(2), torch.zeros(heads, 1), torch.zeros(heads, dtype=torch.long)])
def test_sinks_that_are_not_one_logit_a_head_are_refused(sinks):
    query, key, value, _ = tensors(grad=False)
    options = {"sinks": sinks, "enable_gqa": True}
    for run in (partial(attention, value=value), partial(attention_with_stats, value=value), score_stats):
        with pytest.raises(ShapeError, match="sinks as one logit for each of the 6 query heads"):
            run(query=query, key=key, **options)
