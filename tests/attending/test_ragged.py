"""A ragged batch is each of its sequences alone, and the same padded with a mask: outputs, gradients, statistics."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from attnscale import (
    AttnscaleError,
    MultiheadAttention,
    Visibility,
    attention,
    attention_varlen,
    attention_varlen_with_stats,
    attention_weights,
    attention_with_stats,
    score_moments,
    score_stats,
)
from attnscale.attending import running
from attnscale.attending.ragged import as_one_row, as_tokens, packed_call
from attnscale.errors import InputError, ShapeError
from attnscale.rules import RULES
from tests.attending.test_memory import LargestTensor
from tests.measure.oracle import NAMES
from tests.others import OTHERS_MAY_WARN
from tests.ragged import SEEN, batch, batches
from tests.rules.oracle import EXAMPLES

LENGTHS = [3, 0, 7, 1, 4]
OPTIONS = st.sampled_from([{}, {"scale": "log_length"}, {"softcap": 2.0}, {"scale": "log_length", "softcap": 2.0}])


def alone(ragged, seen, **options):
    """The packed output of each sequence run by itself."""
    outputs = [attention(*sequence, seen, enable_gqa=True, **options) for sequence in ragged.alone()]
    return torch.cat([as_tokens(output) for output in outputs])


def gradients(output, ragged):
    torch.manual_seed(1)
    return torch.autograd.grad(output, ragged.tensors, torch.randn(output.shape).to(output), retain_graph=True)


@given(batches(), OPTIONS)
def test_nested_is_each_sequence_alone_is_padded_with_a_mask(problem, options):
    ragged, seen = problem
    nested = attention(*ragged.nested(), seen, enable_gqa=True, **options)
    assert nested.is_nested
    ours = nested.transpose(1, 2).values()
    expected = alone(ragged, seen, **options)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradients(ours, ragged), gradients(expected, ragged))
    query, key, value, rows, _ = ragged.padded()
    padded = attention(query, key, value, ragged.mask(seen), enable_gqa=True, **options).transpose(1, 2)[rows]
    torch.testing.assert_close(ours, padded)
    torch.testing.assert_close(gradients(ours, ragged), gradients(padded, ragged))


@given(batches(), OPTIONS)
def test_statistics_are_those_of_the_padded_batch_with_a_mask(problem, options):
    ragged, seen = problem
    query, key, *_ = ragged.padded()
    expected = score_stats(query, key, attn_mask=ragged.mask(seen), enable_gqa=True, **options)
    alone_too = None
    for own, theirs, _ in ragged.alone():
        stats = score_stats(own, theirs, attn_mask=seen, enable_gqa=True, **options)
        alone_too = stats if alone_too is None else alone_too + stats
    q, k, v = ragged.nested()
    output, with_output = attention_with_stats(q, k, v, seen, enable_gqa=True, **options)
    found = [score_stats(q, k, attn_mask=seen, enable_gqa=True, **options), with_output, alone_too]
    torch.testing.assert_close(output.values(), attention(q, k, v, seen, enable_gqa=True, **options).values())
    for stats in found:
        assert stats.exact
        for name in (*NAMES, "rows", "count"):
            torch.testing.assert_close(getattr(stats, name), getattr(expected, name), equal_nan=True, msg=name)
    moments = score_moments(q, k, attn_mask=seen, enable_gqa=True, **options)
    if int(expected.count.sum()):
        torch.testing.assert_close(moments.variance, expected.variance)
        torch.testing.assert_close(moments.variance_within_rows, expected.variance_within_rows)


@given(batches(), st.sampled_from([None, 1, 3]), st.booleans())
def test_packed_tokens_are_the_nested_ones(problem, left, is_causal):
    ragged, _ = problem
    rows, keys = ragged.starts
    window = (-1 if left is None else left, -1)
    seen = Visibility(0 if is_causal else None, None if left is None else -left, from_the_end=True)
    options = {"is_causal": is_causal, "enable_gqa": True, "window_size": window}
    ours = attention_varlen(*ragged.tensors, rows, keys, **options)
    expected = attention(*ragged.nested(), seen, enable_gqa=True).transpose(1, 2).values()
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradients(ours, ragged), gradients(expected, ragged))
    output, stats = attention_varlen_with_stats(*ragged.tensors, rows.int(), keys.int(), **options)
    torch.testing.assert_close(output, ours)
    q, k, _ = ragged.nested()
    exact = score_stats(q, k, attn_mask=seen, enable_gqa=True)
    for name in NAMES:
        torch.testing.assert_close(getattr(stats, name), getattr(exact, name), equal_nan=True, msg=name)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_gives_a_sequence_what_it_gives_it_alone(name):
    ragged = batch(LENGTHS, LENGTHS, heads=3, head_dim=11, requires_grad=True)
    rule = EXAMPLES[name].make(3, 3, 11)
    ours = attention(*ragged.nested(), is_causal=True, scale=rule).transpose(1, 2).values()
    if name == "calibrated":  # over all sequences, as over all entries of a batch
        q, k, _ = ragged.nested()
        moments = score_moments(q, k, scale="unscaled")
        expected = alone(ragged, Visibility.causal(), scale=moments.variance.rsqrt().view(-1, 1, 1))
    else:
        expected = alone(ragged, Visibility.causal(), scale=rule)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradients(ours, ragged)[2], gradients(expected, ragged)[2])


def test_a_rule_of_ones_own_is_given_one_sequence_after_the_other():
    seen = []

    def rule(query, key, visible=None):
        seen.append((query.shape[-2], key.shape[-2], visible.tolist()))
        return query, key, 1.0 / query.shape[-2] if query.shape[-2] else 1.0

    ragged = batch([2, 3], [3, 3])
    ours = attention(*ragged.nested(), scale=rule).transpose(1, 2).values()
    assert seen == [(2, 3, [3, 3]), (3, 3, [3, 3, 3])]
    expected = [attention(*sequence, scale=1 / sequence[0].shape[-2]) for sequence in ragged.alone()]
    torch.testing.assert_close(ours, torch.cat([as_tokens(each) for each in expected]))


def test_a_scale_may_be_a_tensor_of_heads_or_of_sequences():
    ragged = batch([2, 3], [2, 3])
    q, k, v = ragged.nested()
    scale = torch.rand(2, 2, 1, 1, dtype=torch.float64)
    for made in (scale, scale[:1], scale[0]):
        ours = attention(q, k, v, scale=made).transpose(1, 2).values()
        each = made.expand(2, 2, 1, 1)
        expected = [attention(*part, scale=own) for part, own in zip(ragged.alone(), each, strict=True)]
        torch.testing.assert_close(ours, torch.cat([as_tokens(output) for output in expected]))


@OTHERS_MAY_WARN
def test_where_sdpa_takes_nested_tensors_ours_is_the_same():
    q, k, v = batch(LENGTHS[2:], [4, 2, 6]).nested()
    torch.testing.assert_close(attention(q, k, v).values(), F.scaled_dot_product_attention(q, k, v).values())


def test_a_causal_bias_is_aligned_in_every_sequence():
    q, k, v = batch([3, 5], [4, 7]).nested()
    for bias, seen in (
        (causal_upper_left(5, 7), Visibility.causal()),
        (causal_lower_right(5, 7), Visibility.causal(from_the_end=True)),
    ):
        torch.testing.assert_close(attention(q, k, v, bias).values(), attention(q, k, v, seen).values())


def test_the_output_adds_to_the_query_and_layers_go_on():
    q, k, v = batch(LENGTHS, LENGTHS, value_dim=3).nested()
    output = attention(q, k, v) + q
    assert attention(output, k, v).shape == q.shape
    even = torch.nested.nested_tensor_from_jagged(torch.randn(5, 7, 3), torch.tensor([0, 2, 5]))  # ragged before heads
    torch.testing.assert_close(attention(even, even, even).values(), attention(*[even.values()] * 3))


@OTHERS_MAY_WARN
def test_strided_nested_tensors_and_tensors_with_holes():
    ragged = batch([3, 5, 2], [3, 5, 2])
    strided = tuple(
        torch.nested.as_nested_tensor([part.squeeze(0) for part in parts])
        for parts in zip(*ragged.alone(), strict=True)
    )
    expected = alone(ragged, Visibility.causal())
    output = attention(*strided, is_causal=True)
    assert output.layout is torch.strided
    torch.testing.assert_close(torch.cat([part.transpose(0, 1) for part in output.unbind()]), expected)
    wide = torch.randn(3, 6, 2, 3, dtype=torch.float64)
    lengths = torch.tensor([3, 5, 2])
    holes = torch.nested.narrow(wide, 1, torch.zeros(3, dtype=torch.long), lengths, layout=torch.jagged).transpose(1, 2)
    ours = attention(holes, holes, holes, is_causal=True)
    for at, length in enumerate(lengths.tolist()):
        part = wide[at : at + 1, :length].transpose(1, 2)
        torch.testing.assert_close(ours.unbind()[at], attention(part, part, part, is_causal=True)[0])
    weights = attention_weights(*ragged.nested()[:2], is_causal=True)
    for matrix, (query, key, _) in zip(weights.unbind(), ragged.alone(), strict=True):
        torch.testing.assert_close(matrix, attention_weights(query, key, is_causal=True)[0])


def test_a_plain_tensor_beside_nested_ones_is_sequences_of_one_length():
    ragged = batch([4, 4], [3, 5])
    _, key, value = ragged.nested()
    plain = ragged.padded()[0]
    for query, expected in ((plain, attention(*ragged.nested())), (plain[:1], None)):
        output = attention(query, key, value)
        assert output.is_nested
        if expected is not None:
            torch.testing.assert_close(output.values(), expected.values())


def test_starts_are_whole_numbers_of_any_size():
    ragged = batch(LENGTHS, LENGTHS)
    expected = attention_varlen(*ragged.tensors, ragged.starts[0], is_causal=True, scale="log_length")
    for dtype in (torch.int32, torch.int16, torch.uint8):
        starts = ragged.starts[0].to(dtype)
        ours, stats = attention_varlen_with_stats(*ragged.tensors, starts, is_causal=True, scale="log_length", rows=9)
        torch.testing.assert_close(ours, expected)
        assert stats.rows.tolist() == [9, 9]


def test_documents_packed_in_a_row_are_sequences():
    ragged = batch(LENGTHS, LENGTHS)
    ids = torch.tensor([3, 3, 3, 0, 0, 0, 0, 0, 0, 0, 1, 2, 2, 2, 2])
    ours = attention_varlen(*ragged.tensors, document_ids=ids, is_causal=True)
    torch.testing.assert_close(ours, alone(ragged, Visibility.causal()))
    row = [as_one_row(tokens) for tokens in ragged.tensors]
    torch.testing.assert_close(as_tokens(attention(*row, Visibility.of_documents(ids, is_causal=True))), ours)
    _, packed = attention_varlen_with_stats(*ragged.tensors, document_ids=ids, is_causal=True, scale="log_length")
    stats = score_stats(*row[:2], attn_mask=Visibility.of_documents(ids, is_causal=True), scale="log_length")
    for name in NAMES:
        torch.testing.assert_close(getattr(stats, name), getattr(packed, name), equal_nan=True)


def test_a_few_rows_are_drawn_from_all_sequences():
    ragged = batch([67, 0, 3, 130, 41], [67, 0, 3, 130, 41], dtype=torch.float32)
    q, k, v = ragged.nested()
    exact = score_stats(q, k, is_causal=True)
    for _ in range(3):
        _, beside = attention_with_stats(q, k, v, is_causal=True, rows=60)
        for some in (score_stats(q, k, is_causal=True, rows=60), beside):
            assert not some.exact
            assert some.rows.tolist() == [60, 60]
            for name in ("mean", "entropy", "top1", "jacobian_trace"):
                error = (getattr(some, name) - getattr(exact, name)).abs()
                assert (error <= 5 * some.stderr(name).nan_to_num(0.05) + 1e-9).all(), name
            assert (some.max <= exact.max).all()
            assert (exact.max <= some.max_bound).all()
    assert score_stats(q, k, rows=1000).exact


def test_autocast_gives_what_each_sequence_is_given():
    ragged = batch(LENGTHS, LENGTHS, dtype=torch.float32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        for options in ({}, {"softcap": 2.0}):
            ours = attention(*ragged.nested(), is_causal=True, **options).transpose(1, 2).values()
            expected = alone(ragged, Visibility.causal(), **options)
            assert ours.dtype == expected.dtype == torch.bfloat16
            torch.testing.assert_close(ours, expected)
        output, stats = attention_with_stats(*ragged.nested(), is_causal=True)
        assert output.dtype == torch.bfloat16
    assert ours.float().sum().backward() is None
    torch.testing.assert_close(stats.std, score_stats(*ragged.nested()[:2], is_causal=True).std)


def test_dropout_keeps_the_mean():
    ragged = batch([40, 60], [40, 60], heads=4, value_dim=3)
    q, k, v = ragged.nested()
    dropped = torch.stack([attention(q, k, v, dropout_p=0.3).values() for _ in range(40)])
    assert float((dropped.mean(0) - attention(q, k, v).values()).abs().mean()) < 0.1
    assert float(dropped.var(0).mean()) > 0


def test_memory_is_linear_in_tokens():
    lengths = [211, 307, 5, 401]
    ragged = batch(lengths, lengths, heads=2, head_dim=8, value_dim=8, dtype=torch.float32, requires_grad=True)
    starts = ragged.starts[0]
    with LargestTensor() as largest:
        output, stats = attention_varlen_with_stats(*ragged.tensors, starts, is_causal=True)
        output.sum().backward()
        attention_varlen(*ragged.tensors, starts, window_size=(7, 0), scale="log_length").sum().backward()
        some = attention_varlen_with_stats(*ragged.tensors, starts, rows=64)[1]
        assert float(stats.entropy.sum() + some.entropy.sum()) > 0
    assert largest.elements < 2 * 2 * 401 * 401  # two buffers of the scores of the longest sequence
    many = batch([16] * 200, [16] * 200, heads=2, head_dim=8, value_dim=8, dtype=torch.float32, requires_grad=True)
    with LargestTensor() as largest:
        attention_varlen(*many.tensors, many.starts[0]).sum().backward()
    assert largest.elements <= 3 * 3200 * 2 * 8


@pytest.mark.usefixtures("flash_on_a_cpu")
@pytest.mark.parametrize("seen", SEEN[2:])
@pytest.mark.parametrize("kv_lens", [[3, 7, 1], [4, 9, 5]])
def test_the_windows_given_to_a_gpu_mean_the_same(seen, kv_lens):
    ragged = batch([3, 7, 1], kv_lens, heads=4, kv_heads=2, head_dim=8, value_dim=8)
    starts = *ragged.starts, None, None, None
    call = packed_call(*ragged.tensors, starts, seen, None, True, None, 0.0)
    if running.kernel_window(call) is None:
        assert kv_lens != ragged.q_lens  # and it counts from the start
        return
    torch.testing.assert_close(as_tokens(running.attend_sequences(call)), alone(ragged, seen))


def test_what_does_not_fit_gets_a_sentence():
    ragged = batch([3, 5], [3, 5])
    q, k, v = ragged.nested()
    other = batch([3, 4], [3, 4]).nested()
    sentences = {
        "no mask with nested tensors": lambda: attention(q, k, v, torch.ones(5, 5, dtype=torch.bool)),
        "Explicit attn_mask should not be set": lambda: attention(q, k, v, Visibility.causal(), is_causal=True),
        "one value per key in every sequence": lambda: attention(q, k, other[2]),
        "2 sequences in key.*got 3|3 sequences in": lambda: attention(q, *batch([1, 2, 3], [1, 2, 3]).nested()[1:]),
        "put heads before the length": lambda: attention(q.transpose(1, 2), k, v),
        "nested like the other tensors": lambda: attention(q, k, torch.randn(5, 3)),
        "either cu_seqlens_q or document_ids": lambda: attention_varlen(*ragged.tensors),
        "begin with 0 and never": lambda: attention_varlen(*ragged.tensors, torch.tensor([0, 5, 3, 8])),
        "last offset to equal the query's 8 tokens": lambda: attention_varlen(*ragged.tensors, torch.tensor([0, 5])),
        "whole numbers": lambda: attention_varlen(*ragged.tensors, torch.tensor([0.0, 8.0])),
        "packed tokens": lambda: attention_varlen(q, k, v, torch.tensor([0, 8])),
        "document_ids for each of the 8 tokens": lambda: attention_varlen(*ragged.tensors, document_ids=torch.zeros(7)),
        "numbers of keys, −1 for all": lambda: attention_varlen(*ragged.tensors, ragged.starts[0], window_size=(-2, 0)),
        "equally many key and query sequences": lambda: attention_varlen(
            *ragged.tensors, torch.tensor([0, 8]), torch.tensor([0, 3, 8])
        ),
        "whole number of at least 1": lambda: score_stats(q, k, rows=0),
    }
    for sentence, call in sentences.items():
        with pytest.raises(AttnscaleError, match=sentence):
            call()
    assert issubclass(ShapeError, RuntimeError)
    assert issubclass(InputError, ValueError)


@OTHERS_MAY_WARN
@pytest.mark.parametrize("options", [{}, {"scale": "QKNorm"}, {"softcap": 2.0}])
@pytest.mark.parametrize("need_weights", [False, True])
def test_the_module_gives_a_sequence_what_it_gives_it_alone(options, need_weights):
    layer = MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64, **options)
    tokens = torch.randn(15, 12, dtype=torch.float64, requires_grad=True)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    jagged = torch.nested.nested_tensor_from_jagged(tokens, starts)
    output, weights = layer(jagged, jagged, jagged, need_weights=need_weights, is_causal=True)
    parts = tokens.split(LENGTHS)
    expected = [layer(part, part, part, need_weights=need_weights, is_causal=True) for part in parts]
    torch.testing.assert_close(output.values(), torch.cat([each for each, _ in expected]))
    learning = [tokens, *layer.parameters()]
    ours, theirs = (
        torch.autograd.grad(each.sin().sum(), learning, allow_unused=True)
        for each in (output.values(), torch.cat([each for each, _ in expected]))
    )
    torch.testing.assert_close(ours, theirs)
    if need_weights:
        for own, (_, alone) in zip(weights.unbind(), expected, strict=True):
            torch.testing.assert_close(own, alone)
    strided = torch.nested.as_nested_tensor([part.detach() for part in parts])
    again, _ = layer(strided, strided, strided, need_weights=False, is_causal=True)
    torch.testing.assert_close(torch.cat(again.unbind()), output.values())


def test_the_module_says_what_a_ragged_batch_lacks():
    jagged = torch.nested.nested_tensor_from_jagged(torch.randn(5, 12), torch.tensor([0, 2, 5]))
    with pytest.raises(InputError, match="batch_first=True"):
        MultiheadAttention(12, 3)(jagged, jagged, jagged)
    with pytest.raises(InputError, match="no mask with nested tensors"):
        MultiheadAttention(12, 3, batch_first=True)(jagged, jagged, jagged, attn_mask=torch.ones(3, 3).bool())
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(InputError, match="Expected no add_bias_kv and no add_zero_attn with nested tensors"):
            MultiheadAttention(12, 3, batch_first=True, **{option: True})(jagged, jagged, jagged)


@OTHERS_MAY_WARN
@pytest.mark.parametrize("shared", ["query", "key", "value", "key and value"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_batch_of_one_sequence_is_shared_by_all(shared, layout, heads):
    torch.manual_seed(0)
    keys = [4] * 5 if shared != "query" else [2, 5, 1, 4, 3]
    parts = {
        "query": [torch.randn(3, length, 8) for length in (3, 1, 6, 2, 4)],
        "key": [torch.randn(heads, length, 8) for length in keys],
        "value": [torch.randn(3, length, 5) for length in keys],
    }
    for name in shared.split(" and "):
        parts[name] = [parts[name][0]] * 5
    alone = [attention(*(part.unsqueeze(0) for part in each))[0] for each in zip(*parts.values(), strict=True)]
    given = {name: each[:1] if name in shared.split(" and ") else each for name, each in parts.items()}
    nested = [torch.nested.nested_tensor(each, layout=torch.strided) for each in given.values()]
    if layout is torch.jagged:
        tokens = ([part.transpose(0, 1) for part in each] for each in given.values())
        nested = [torch.nested.nested_tensor(each, layout=layout).transpose(1, 2) for each in tokens]
    output = attention(*nested)
    for found, expected in zip(output.unbind(), alone, strict=True):
        torch.testing.assert_close(found, expected)
    _, stats = attention_with_stats(*nested)
    assert stats.rows.tolist() == [sum(len(part[0]) for part in (parts["query"]))] * 3
