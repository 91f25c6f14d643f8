"""Attention in one graph that takes any length: what runs in blocks of rows makes no graph for each."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attnscale import attention, visibility
from attnscale.attending import row_blocks, sdpa
from attnscale.visibility import Visibility
from tests.others import OTHERS_MAY_WARN
from tests.precision import assert_same

pytestmark = OTHERS_MAY_WARN
batch, heads, kv_heads, head_dim, value_dim = 2, 6, 3, 5, 7
LENGTHS = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47)  # more than Dynamo makes graphs of one function


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    """So that short sequences are cut, as long ones are."""
    rows = (row_blocks, "BLOCK_ROWS"), (row_blocks, "LEAST_ROWS"), (sdpa, "MASK_ROWS"), (visibility, "COUNTING_ROWS")
    for module, name in rows:
        monkeypatch.setattr(module, name, 11)
    torch._dynamo.reset()


def documents(length):
    return torch.arange(length) // 7


def shown(length):
    return torch.rand(batch, 1, length, length) < 0.6 + torch.eye(length)


CASES = {
    "plain": lambda length: {},
    "counted": lambda length: {"scale": "log_length"},
    "counted, causal": lambda length: {"scale": "log_length", "is_causal": True},
    "soft-cap": lambda length: {"softcap": 2.0},
    "causal soft-cap": lambda length: {"softcap": 2.0, "is_causal": True},
    "soft-cap of a mask": lambda length: {"softcap": 2.0, "attn_mask": shown(length)},
    "window": lambda length: {"attn_mask": Visibility.causal(window=4)},
    "documents": lambda length: {"attn_mask": Visibility.of_documents(documents(length), is_causal=True)},
    "mask": lambda length: {"attn_mask": shown(length)},
    "counted mask": lambda length: {"attn_mask": shown(length), "scale": "log_length"},
    "counted documents": lambda length: {
        "attn_mask": Visibility.of_documents(documents(length)),
        "scale": "log_length",
    },
}


def inputs(length):
    shapes = (heads, length, head_dim), (kv_heads, length, head_dim), (kv_heads, length, value_dim)
    return [torch.randn(batch, *shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("case", CASES)
def test_one_graph_takes_every_length(case):
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(attention, backend=counter, fullgraph=True)
    for length in LENGTHS:
        given, options = inputs(length), CASES[case](length) | {"enable_gqa": True}
        assert_same(run(*given, **options), attention(*given, **options), given)
    assert counter.frame_count <= 2  # of the first length, and of any


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("rows", [1, 5])
def test_one_graph_takes_a_cache_as_it_grows(rows, softcap):
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(attention, backend=counter, fullgraph=True)
    window = Visibility.causal(window=4, from_the_end=True)
    for length in LENGTHS:
        _, key, value = inputs(length)
        query = torch.randn(batch, kv_heads, rows, head_dim)
        given = query, key.detach(), value.detach(), window
        torch.testing.assert_close(run(*given, softcap=softcap), attention(*given, softcap=softcap))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_dropout_of_any_length_keeps_the_mean_and_its_backward(softcap):
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(attention, backend=counter, fullgraph=True)
    ones = []
    for length in LENGTHS:
        query, key, _ = inputs(length)
        value = torch.ones(batch, kv_heads, length, value_dim, requires_grad=True)
        output = run(query, key, value, dropout_p=0.25, softcap=softcap, enable_gqa=True)
        (of_value,) = torch.autograd.grad(output.sum(), value)
        torch.testing.assert_close(of_value.sum(), output.sum())  # what was dropped forward is dropped backward
        ones.append(output.detach().mean())
    assert counter.frame_count <= 2
    assert abs(float(torch.stack(ones).mean()) - 1) < 0.05


def test_a_softcap_with_a_learned_mask_compiles():
    given, mask = inputs(13), torch.randn(heads, 13, 13, requires_grad=True)

    def run(*tensors):
        return attention(*tensors, mask, softcap=2.0, enable_gqa=True)

    assert_same(torch.compile(run, backend="aot_eager", fullgraph=True)(*given), run(*given), [*given, mask])


def test_a_window_of_any_length_is_exported():
    class Windowed(torch.nn.Module):
        def forward(self, query):
            return attention(query, query, query, Visibility.causal(window=4))

    query = inputs(13)[0].detach()
    exported = torch.export.export(
        Windowed(), (query,), dynamic_shapes={"query": {2: torch.export.Dim("length", min=2)}}
    )
    for length in (7, 13, 29):
        query = inputs(length)[0].detach()
        torch.testing.assert_close(exported.module()(query), Windowed()(query))
