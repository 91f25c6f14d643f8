"""Ragged batches in one graph of torch.compile: what is given as lengths is not looked at while it is traced."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nested import nested_tensor_from_jagged

from attnscale import (
    MultiheadAttention,
    attention,
    attention_varlen,
    attention_varlen_with_stats,
    attention_with_stats,
    score_stats,
)
from attnscale.attending import running
from attnscale.attending.ragged import Ragged, packed_call
from attnscale.attending.running import run, run_sequences
from tests.others import OTHERS_MAY_WARN
from tests.precision import assert_same
from tests.ragged import SEEN, batch, batches
from tests.rules.oracle import EXAMPLES

pytestmark = OTHERS_MAY_WARN
Q_LENS, KV_LENS = [3, 0, 7, 1], [4, 2, 5, 1]


def assert_one_graph(run, ragged, *given, backend="aot_eager"):
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    learning = [tensor for tensor in ragged.tensors if tensor.requires_grad]
    assert_same(_tokens(compiled(*given)), _tokens(run(*given)), learning)


def _tokens(output):
    return output.transpose(1, 2).values() if output.is_nested else output


@settings(max_examples=20)
@given(batches(), st.sampled_from([None, 2.0]))
def test_one_attention_with_a_mask_is_each_sequence_alone(problem, softcap):
    ragged, seen = problem
    starts = *ragged.starts, None, None, None
    call = packed_call(*ragged.tensors, starts, seen, "log_length", True, softcap, 0.0)
    assert_same(run(call.as_masked()), run_sequences(call), ragged.tensors, retain_graph=True)


def test_packed_tokens_make_one_graph_with_gradients():
    ragged = batch(Q_LENS, KV_LENS, heads=4, kv_heads=2, requires_grad=True)

    def run(*given):
        window = {"is_causal": True, "window_size": (2, 1), "softcap": 2.0}
        return attention_varlen(*given, enable_gqa=True, **window) * 2 + attention_varlen(*given, enable_gqa=True)

    assert_one_graph(run, ragged, *ragged.tensors, *ragged.starts)


def test_jagged_tensors_and_rules_make_one_graph_with_gradients():
    ragged = batch(Q_LENS, Q_LENS, heads=3, head_dim=11, value_dim=11, requires_grad=True)
    rule = EXAMPLES["log_length"].make(3, 3, 11)

    def run(query, key, value):
        return attention(query * 1.5, key, value, SEEN[4], scale=rule) + query

    assert_one_graph(run, ragged, *ragged.nested())


def test_documents_are_found_inside_the_graph():
    ragged = batch([5, 4], [5, 4], requires_grad=True)

    def run(query, key, value, ids):
        return attention_varlen(query, key, value, document_ids=ids, is_causal=True)

    assert_one_graph(run, ragged, *ragged.tensors, torch.tensor([3] * 5 + [0] * 4))


@pytest.mark.slow
def test_inductor_compiles_jagged_tensors():
    ragged = batch(Q_LENS, Q_LENS, value_dim=3, dtype=torch.float32, requires_grad=True)

    def run(query, key, value):
        return attention(query * 2, key, value, is_causal=True, scale="log_length") + query

    assert_one_graph(run, ragged, *ragged.nested(), backend="inductor")


def test_other_lengths_are_not_compiled_again():
    graphs = []

    def counted(module, inputs):
        graphs.append(module)
        return module.forward

    def run(query, key, value, starts):
        return attention_varlen(query, key, value, starts, is_causal=True, scale="log_length")

    def run_nested(query, key, value):
        return attention(query, key, value, is_causal=True, scale="log_length")

    packed, nested = (torch.compile(each, fullgraph=True, backend=counted) for each in (run, run_nested))
    many = []
    for lengths in ([3, 4, 9], [5, 2, 2], [1, 1, 6, 2], [8, 0, 2, 2, 2], [2, 17]):
        ragged = batch(lengths, lengths)
        given = *ragged.tensors, ragged.starts[0]
        torch.testing.assert_close(packed(*given), run(*given))
        torch.testing.assert_close(_tokens(nested(*ragged.nested())), run(*given))
        many.append(len(graphs))
    assert many[2:] == [many[2]] * 3  # once the tokens, and then the sequences, are any number


@pytest.mark.parametrize("rows", [None, 6])
def test_statistics_are_measured_outside_the_graph(rows):
    ragged = batch(Q_LENS, Q_LENS, requires_grad=True)

    def run(*given):
        output, stats = attention_with_stats(*given, is_causal=True, rows=rows)
        return _tokens(output) * 2, stats.rows, score_stats(*given[:2]).entropy

    (ours, *found), (expected, *exact) = (
        each(*ragged.nested()) for each in (torch.compile(run, backend="aot_eager"), run)
    )
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(found, exact)
    packed = torch.compile(attention_varlen_with_stats, backend="aot_eager")
    assert packed(*ragged.tensors, ragged.starts[0])[1].rows.tolist() == [sum(Q_LENS)] * 2


def test_an_exported_program_takes_any_lengths():
    class Packed(torch.nn.Module):
        def forward(self, tokens, starts):
            return attention_varlen(tokens, tokens, tokens, starts, is_causal=True, scale="log_length")

    any_number = torch.export.Dim.DYNAMIC
    sizes = {"tokens": {0: any_number}, "starts": {0: any_number}}
    program = torch.export.export(Packed(), (torch.randn(8, 2, 3), torch.tensor([0, 3, 8])), dynamic_shapes=sizes)
    tokens, starts = torch.randn(13, 2, 3), torch.tensor([0, 5, 5, 6, 13])
    torch.testing.assert_close(program.module()(tokens, starts), Packed()(tokens, starts))


def test_the_module_makes_one_graph():
    layer = MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64, scale="QKNorm")
    tokens = torch.randn(sum(Q_LENS), 12, dtype=torch.float64, requires_grad=True)
    jagged = torch.nested.nested_tensor_from_jagged(tokens, torch.tensor([0, *Q_LENS]).cumsum(0))

    def run(x):
        return layer(x, x, x, need_weights=False)[0]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same(compiled(jagged).values(), run(jagged).values(), [tokens, *layer.parameters()])


def test_a_batch_under_autocast_is_cast_before_it_is_run():
    ragged = batch(Q_LENS, Q_LENS, dtype=torch.float32, requires_grad=True)

    def run(*given):
        with torch.autocast("cpu", torch.bfloat16):
            return attention_varlen(*given, softcap=3.0)

    given = *ragged.tensors, ragged.starts[0]
    ours, expected = torch.compile(run, fullgraph=True, backend="aot_eager")(*given), run(*given)
    assert ours.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(ours, expected)


def test_dropout_drops_the_same_weights_in_the_backward():
    ragged = batch([4, 3], [4, 3], heads=1, requires_grad=True)
    values = torch.eye(7, dtype=torch.float64).unsqueeze(1).requires_grad_()

    def run(*given):
        return attention_varlen(*given, dropout_p=0.5)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    weights = compiled(ragged.query, ragged.key, values, ragged.starts[0])
    (found,) = torch.autograd.grad(weights[:, 0, :].sum(), values)
    torch.testing.assert_close(found[:, 0], weights[:, 0].sum(0).unsqueeze(-1).expand(7, 7).detach())
    assert 0 < int((weights == 0).sum()) - 24 < 25  # of 4·4 + 3·3 weights, beside those of other sequences
    again = compiled(ragged.query, ragged.key, values, ragged.starts[0])
    assert not torch.equal(weights, again)


def test_fake_and_meta_tensors_give_shapes():
    ragged = batch(Q_LENS, KV_LENS, heads=4, kv_heads=2)
    options = {"is_causal": True, "scale": "log_length", "enable_gqa": True}
    given = *ragged.tensors, *ragged.starts
    expected = attention_varlen(*given, **options)
    with FakeTensorMode() as mode:
        faked = attention_varlen(*(mode.from_tensor(each) for each in given), **options)
    for each in (faked, attention_varlen(*(each.to("meta") for each in given), **options)):
        assert (each.shape, each.dtype) == (expected.shape, expected.dtype)


@pytest.mark.usefixtures("flash_on_a_cpu")
def test_the_gpu_kernel_is_part_of_the_graph(monkeypatch):
    monkeypatch.setattr(running, "serves_sequences", lambda ragged: running.kernel_window(ragged) is not None)
    ragged = batch(Q_LENS, Q_LENS, head_dim=8, value_dim=8)
    starts = ragged.starts[0]
    expected = [attention_varlen(*ragged.tensors, starts, is_causal=causal) for causal in (True, False)]

    def run(query, key, value, starts):
        packed = [attention_varlen(query, key, value, starts, is_causal=causal) for causal in (True, False)]
        nested = (nested_tensor_from_jagged(tokens, starts).transpose(1, 2) for tokens in (query, key, value))
        return *packed, attention(*nested, is_causal=True).transpose(1, 2).values()

    monkeypatch.setattr(Ragged, "as_masked", None)  # what would run without it
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*ragged.tensors, starts), (*expected, expected[0]))


def test_a_users_own_rule_runs_outside_the_graph():
    """Rules of one's own are called sequence by sequence."""
    ragged = batch(Q_LENS, Q_LENS)

    def run(*given):
        return attention(*given, scale=lambda query, key, visible: (query, key, 0.3)) * 2

    expected = attention(*ragged.nested(), scale=0.3) * 2
    torch.testing.assert_close(_tokens(torch.compile(run, backend="aot_eager")(*ragged.nested())), _tokens(expected))
