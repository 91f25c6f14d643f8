"""Attention with statistics, and statistics alone, of plain tensors in one graph of torch.compile."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from attnscale import MultiheadAttention, attention_with_stats, rules, score_stats
from attnscale.measure.measuring import measured_scores
from attnscale.operator import scaled_call
from attnscale.visibility import EVERYTHING, Visibility
from tests.measure.oracle import NAMES
from tests.others import OTHERS_MAY_WARN

pytestmark = OTHERS_MAY_WARN
batch, heads, kv_heads, q_len, kv_len, head_dim = 2, 6, 3, 13, 17, 11


def tensors(q_len=q_len, kv_len=kv_len, heads=heads, kv_heads=heads, dtype=torch.float64, value_dim=head_dim):
    shapes = (heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, value_dim)
    return [torch.randn(batch, *shape, dtype=dtype, requires_grad=True) for shape in shapes]


def shown(share=0.6):
    mask = torch.rand(batch, 1, q_len, kv_len) < share
    mask[..., 0] = True
    return mask


def hiding_by_numbers():
    return torch.where(shown(), 0.0, -1e4).double()


WINDOW = {"attn_mask": Visibility.causal(window=4, from_the_end=True)}
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": shown()},
    "hiding by numbers": {"attn_mask": hiding_by_numbers()},
    "learned bias": {"attn_mask": torch.randn(heads, q_len, kv_len, dtype=torch.float64, requires_grad=True)},
    "window": WINDOW,
    "documents": {"attn_mask": Visibility.of_documents(torch.arange(q_len) // 5, torch.arange(kv_len) // 5)},
    "capped": {"softcap": 2.0, "is_causal": True},
    "number": {"scale": 0.2},
    "tensor": {"scale": torch.rand(heads, 1, 1, dtype=torch.float64)},
    "log_length": {"scale": "log_length", "attn_mask": shown()},
    "calibrated": {"scale": "calibrated", "softcap": 3.0},
    "LearnedTemperature": {"scale": rules.LearnedTemperature(heads).double(), "is_causal": True},
    "capped mask": {"softcap": 2.0, "attn_mask": shown()},
    "own rule": {"scale": lambda query, key, visible: (query * 2, key, 0.1)},
}


def compiled(run, backend="aot_eager", **options):
    return torch.compile(run, fullgraph=True, backend=backend, **options)


def assert_same_statistics(ours, exact):
    for name in (*NAMES, "rows", "count", "keys", "max_bound"):
        torch.testing.assert_close(getattr(ours, name), getattr(exact, name), equal_nan=True, msg=name)


@pytest.mark.parametrize(("name", "grouped"), [*((name, False) for name in OPTIONS), ("plain", True), ("capped", True)])
def test_one_graph_gives_the_output_its_gradients_and_the_statistics(name, grouped):
    options = OPTIONS[name]
    inputs = tensors(kv_heads=kv_heads if grouped else heads)

    def run(query, key, value):
        return attention_with_stats(query * 1.5, key, value, enable_gqa=grouped, **options)

    (ours, stats), (expected, exact) = compiled(run)(*inputs), run(*inputs)
    torch.testing.assert_close(ours, expected)
    assert stats.exact
    assert_same_statistics(stats, exact)
    mask = options.get("attn_mask")
    learning = [*inputs, mask] if isinstance(mask, torch.Tensor) and mask.requires_grad else inputs
    found = [torch.autograd.grad(each.sin().sum(), learning) for each in (ours, expected)]
    torch.testing.assert_close(*found)


def test_statistics_are_read_inside_the_graph():
    def run(query, key, value):
        output, stats = attention_with_stats(query, key, value, is_causal=True)
        alone = score_stats(query, key, softcap=2.0, attn_mask=mask)
        few = score_stats(query, key, rows=batch * q_len)
        sunk = score_stats(query, key, sinks=sinks).learned_sink
        return output * stats.entropy.mean(), stats.std, stats.count, alone.max, alone.saturated, few.top1, sunk

    mask, inputs, sinks = shown(), tensors(), torch.randn(heads, dtype=torch.float64)
    ours, expected = compiled(run)(*inputs), run(*inputs)
    torch.testing.assert_close(ours, expected)
    found = [torch.autograd.grad(each[0].sum(), inputs) for each in (ours, expected)]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("rows", [5, batch * q_len, 1000])
def test_some_rows_are_drawn_anew_at_each_run(rows):
    inputs = tensors()

    def run(*given):
        return attention_with_stats(*given, is_causal=True, rows=rows)

    (_, stats), (_, like) = compiled(run)(*inputs), run(*inputs)
    exact = score_stats(*inputs[:2], is_causal=True)
    assert stats.exact == like.exact
    assert stats.rows.tolist() == like.rows.tolist()
    assert (exact.max <= stats.max_bound).all()
    torch.testing.assert_close(stats.max_bound, like.max_bound)
    assert stats.stderr("entropy").shape == (heads,)
    assert (stats.stderr("entropy") == 0).all() == stats.exact


def test_inductor_takes_it_too():
    inputs = tensors(dtype=torch.float32, kv_heads=kv_heads)

    def run(query, key, value):
        output, stats = attention_with_stats(query * 2, key, value, is_causal=True, scale="log_length", enable_gqa=True)
        return output + query, stats.entropy, attention_with_stats(query, key, value, rows=4, enable_gqa=True)[0]

    ours, expected = compiled(run, "inductor")(*inputs), run(*inputs)
    torch.testing.assert_close(ours, expected)
    found = [torch.autograd.grad(each[0].sin().sum(), inputs) for each in (ours, expected)]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("options", "dynamic"),
    [
        ({"is_causal": True}, None),
        ({"scale": "log_length"}, True),
        ({"softcap": 2.0}, True),
        ({"rows": 5}, True),
        (WINDOW, True),
    ],
)
def test_one_graph_serves_symbolic_lengths(options, dynamic):
    graphs = []

    def counted(module, inputs):
        graphs.append(module)
        return module.forward

    def run(query, key, value):
        output, stats = attention_with_stats(query, key, value, **options)
        return output, stats.rows, score_stats(query, key).entropy

    many, compiling = [], compiled(run, counted, dynamic=dynamic)
    for length in (61, 67, 71):
        inputs = tensors(q_len=length, kv_len=length + 6)
        torch.testing.assert_close(compiling(*inputs), run(*inputs))
        many.append(len(graphs))
    assert many[1:] == [many[1]] * 2
    assert many[0] == many[1] or dynamic is None


def test_an_exported_program_takes_any_length():
    class Attention(nn.Module):
        def forward(self, query, key, value):
            output, stats = attention_with_stats(query, key, value, is_causal=True, scale="log_length")
            return output, stats.entropy

    any_number = torch.export.Dim.DYNAMIC
    sizes = {name: {0: any_number, 2: any_number} for name in ("query", "key", "value")}
    program = torch.export.export(Attention(), tuple(tensors()), dynamic_shapes=sizes)
    inputs = tensors(q_len=23, kv_len=29)
    torch.testing.assert_close(program.module()(*inputs), Attention()(*inputs))


@pytest.mark.parametrize("need_weights", [False, True])
def test_the_module_makes_one_graph(need_weights):
    add = {"add_bias_kv": True, "add_zero_attn": True}
    layer = MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64, scale="QKNorm", softcap=5.0, **add)
    tokens = torch.randn(batch, q_len, 12, dtype=torch.float64, requires_grad=True)
    padding = torch.arange(q_len) >= torch.tensor([[q_len], [q_len - 4]])

    def run(x):
        return layer(x, x, x, key_padding_mask=padding, need_weights=need_weights)[0]

    ours, expected = compiled(run)(tokens), run(tokens)
    torch.testing.assert_close(ours, expected)
    learning = [tokens, *layer.parameters()]
    found = [torch.autograd.grad(each.sin().sum(), learning, allow_unused=True) for each in (ours, expected)]
    torch.testing.assert_close(*found)


def test_autocast_and_dropout_are_those_of_attention():
    inputs = tensors(dtype=torch.float32)

    def run(*given):
        with torch.autocast("cpu", torch.bfloat16):
            return attention_with_stats(*given)

    (ours, stats), (expected, exact) = compiled(run)(*inputs), run(*inputs)
    assert ours.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(ours, expected)
    assert_same_statistics(stats, exact)
    dropped, stats = compiled(lambda *given: attention_with_stats(*given, dropout_p=1.0))(*inputs)
    assert not dropped.any()
    assert_same_statistics(stats, exact)


def test_tensors_without_values_give_shapes():
    inputs = tensors(kv_heads=kv_heads)
    expected = attention_with_stats(*inputs, enable_gqa=True)
    with FakeTensorMode() as mode:
        faked = attention_with_stats(*(mode.from_tensor(each) for each in inputs), enable_gqa=True)
    for output, stats in (faked, attention_with_stats(*(each.to("meta") for each in inputs), enable_gqa=True)):
        assert (output.shape, output.dtype) == (expected[0].shape, expected[0].dtype)
        assert stats.entropy.shape == (heads,)


def test_the_operators_keep_torchs_rules():
    inputs = tensors(kv_heads=kv_heads)
    call = scaled_call(*inputs, EVERYTHING, None, True, None)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    given = call.query.detach(), call.key.detach(), call.scale, None, None, None, 0, None, 3.0
    torch.library.opcheck(measured_scores, (*given, None, 5), test_utils=checks)
    torch.library.opcheck(measured_scores, (*given, None, None), test_utils=checks)
