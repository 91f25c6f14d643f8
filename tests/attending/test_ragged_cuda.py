"""Ragged batches on a CUDA device: torch's kernels for sequences laid end to end, and the statistics of documents."""

import pytest
import torch

from attnscale import Visibility, attention, attention_varlen, attention_varlen_with_stats, attention_with_stats
from attnscale.measure.cuda.launch import on_hopper
from tests.measure.oracle import NAMES
from tests.ragged import Batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
]
Q_LENS, KV_LENS = [67, 0, 131, 1, 300], [67, 5, 140, 33, 311]
WINDOWS = {
    "everything": ((-1, -1), False),
    "causal": ((-1, -1), True),
    "a window": ((40, 0), True),
    "to both sides": ((20, 7), False),
}


def packed(dtype, same, kv_heads=4, head_dim=64, value_dim=64):
    lengths = Q_LENS, Q_LENS if same else KV_LENS
    rows, keys = map(sum, lengths)
    shapes = (rows, 4, head_dim), (keys, kv_heads, head_dim), (keys, kv_heads, value_dim)
    tensors = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes)
    return Batch(*tensors, *lengths)


def in_double(batch, seen, **options):
    """Each sequence alone, in double precision on a CPU, with its gradients."""
    tensors = [tensor.detach().double().cpu().requires_grad_() for tensor in batch.tensors]
    one = Batch(*tensors, batch.q_lens, batch.kv_lens)
    outputs = [attention(*part, seen, enable_gqa=True, **options)[0].transpose(0, 1) for part in one.alone()]
    output = torch.cat(outputs)
    return output, torch.autograd.grad(output.sin().sum(), tensors)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 40, 11])
def test_packed_tokens_give_what_each_sequence_gives_alone(window, same, kv_heads, dtype, head_dim):
    batch = packed(dtype, same, kv_heads, head_dim, head_dim)
    starts = [offsets.cuda().int() for offsets in batch.starts]
    size, is_causal = WINDOWS[window]
    ours = attention_varlen(*batch.tensors, *starts, is_causal=is_causal, window_size=size, enable_gqa=True)
    left, right = (None if side < 0 else side for side in size)
    seen = Visibility(0 if is_causal else right, None if left is None else -left, from_the_end=True)
    expected, gradients = in_double(batch, seen)
    limit = 30 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double().cpu(), expected, rtol=limit, atol=limit)
    for own, wanted in zip(torch.autograd.grad(ours.sin().sum(), batch.tensors), gradients, strict=True):
        torch.testing.assert_close(own.double().cpu(), wanted, rtol=10 * limit, atol=10 * limit)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("scale", [None, "log_length", "calibrated"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_nested_tensors_with_statistics(same, is_causal, scale, softcap):
    batch = packed(torch.float32, same)
    rows, keys = (offsets.cuda() for offsets in batch.starts)
    keys = rows if same else keys
    nested = [
        torch.nested.nested_tensor_from_jagged(tokens, offsets).transpose(1, 2)
        for tokens, offsets in zip(batch.tensors, (rows, keys, keys), strict=True)
    ]
    output, stats = attention_with_stats(*nested, is_causal=is_causal, scale=scale, softcap=softcap)
    cpu = [
        torch.nested.nested_tensor_from_jagged(tokens.detach().double().cpu(), offsets.cpu()).transpose(1, 2)
        for tokens, offsets in zip(batch.tensors, (rows, keys, keys), strict=True)
    ]
    expected, exact = attention_with_stats(*cpu, is_causal=is_causal, scale=scale, softcap=softcap)
    torch.testing.assert_close(output.values().double().cpu(), expected.values(), rtol=1e-4, atol=1e-4)
    for name in NAMES:
        torch.testing.assert_close(
            getattr(stats, name).double().cpu(), getattr(exact, name).double(), rtol=1e-4, atol=1e-4, msg=name
        )


def test_a_few_rows_of_packed_tokens():
    batch = packed(torch.bfloat16, True)
    options = {"cu_seqlens_q": batch.starts[0].cuda().int(), "is_causal": True, "window_size": (200, 0)}
    _, exact = attention_varlen_with_stats(*batch.tensors, **options)
    output, some = attention_varlen_with_stats(*batch.tensors, **options, rows=64)
    torch.testing.assert_close(output, attention_varlen(*batch.tensors, **options))
    assert exact.exact
    assert not some.exact
    for name in ("mean", "entropy", "top1"):
        assert ((getattr(some, name) - getattr(exact, name)).abs() <= 5 * some.stderr(name)).all(), name
    assert (exact.max <= some.max_bound).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_all_rows_are_looked_at_where_some_cost_more(is_causal):
    batch = packed(torch.bfloat16, True)
    options = {"cu_seqlens_q": batch.starts[0].cuda().int(), "is_causal": is_causal}
    output, some = attention_varlen_with_stats(*batch.tensors, **options, rows=64)
    wanted, exact = attention_varlen_with_stats(*batch.tensors, **options)
    assert some.exact == on_hopper(0)
    if some.exact:
        assert torch.equal(output, wanted)
        assert torch.equal(some.entropy, exact.entropy)


def test_no_padding_and_memory_linear_in_tokens():
    lengths = [8192, 16, 16, 16, 16, 16, 16, 16]
    tokens = torch.randn(sum(lengths), 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    starts = torch.tensor([0, *lengths], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output, stats = attention_varlen_with_stats(tokens, tokens, tokens, starts, is_causal=True)
    output.float().sum().backward()
    float(stats.entropy.sum())
    used = torch.cuda.max_memory_allocated() - before
    assert used < 20 * tokens.numel() * tokens.element_size()  # padded to eight times the longest it would be more


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"softcap": 5.0, "scale": "log_length"}])
def test_compiled_ragged_batches_have_their_gradients_and_statistics(dtype, options):
    batch = packed(dtype, True)
    starts = batch.starts[0].cuda().int()

    def run(*given):
        output, stats = attention_varlen_with_stats(*given, starts, **options)
        return attention_varlen(*given, starts, **options) + output, stats.entropy, stats.max

    ours, entropy, largest = torch.compile(run)(*batch.tensors)  # statistics are measured outside the graph
    expected, exact, highest = run(*batch.tensors)
    limit = 30 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours, expected, rtol=limit, atol=limit)
    torch.testing.assert_close((entropy, largest), (exact, highest), rtol=1e-4, atol=1e-4)
    found = [torch.autograd.grad(each.sin().sum(), batch.tensors) for each in (ours, expected)]
    torch.testing.assert_close(*found, rtol=10 * limit, atol=10 * limit)


@pytest.mark.parametrize("is_causal", [True, False])
def test_jagged_tensors_make_one_graph_for_any_lengths(is_causal):
    graphs = []

    def counted(module, inputs):
        graphs.append(module)
        return module.forward

    def run(query, key, value):
        return attention(query, key, value, is_causal=is_causal) + query

    compiled = torch.compile(run, fullgraph=True, backend=counted)
    for lengths in ([67, 131, 1], [40, 7, 300], [5, 0, 5, 90], [11, 200]):
        starts = torch.tensor([0, *lengths]).cumsum(0).cuda()
        tokens = torch.randn(sum(lengths), 4, 64, device="cuda", dtype=torch.bfloat16)
        nested = torch.nested.nested_tensor_from_jagged(tokens, starts).transpose(1, 2)
        ours, expected = compiled(nested, nested, nested), run(nested, nested, nested)
        torch.testing.assert_close(ours.values(), expected.values(), rtol=0.03, atol=0.03)
    assert len(graphs) <= 3
