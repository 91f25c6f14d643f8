"""A ragged batch gives what each sequence gives alone, and what the padded batch gives with a mask."""

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
from attnscale.rules import RULES
from tests.attending.test_memory import LargestTensor
from tests.measure.oracle import NAMES
from tests.others import OTHERS_MAY_WARN
from tests.precision import assert_same
from tests.ragged import SEEN, batch, batches
from tests.rules.oracle import EXAMPLES

LENGTHS = [3, 0, 7, 1, 4]
OPTIONS = st.sampled_from([{}, {"scale": "log_length"}, {"softcap": 2.0}, {"scale": "log_length", "softcap": 2.0}])


def alone(ragged, seen, **options):
    """The packed output of each sequence run by itself."""
    outputs = [attention(*sequence, seen, enable_gqa=True, **options) for sequence in ragged.alone()]
    return torch.cat([as_tokens(output) for output in outputs])


def packed(output):
    return output.transpose(1, 2).values()


def assert_same_statistics(stats, expected):
    for name in (*NAMES, "rows", "count"):
        torch.testing.assert_close(getattr(stats, name), getattr(expected, name), equal_nan=True, msg=name)


@given(batches(), OPTIONS)
def test_nested_tensors_equal_each_sequence_alone_and_the_padded_batch(problem, options):
    ragged, seen = problem
    ours = packed(attention(*ragged.nested(), seen, enable_gqa=True, **options))
    assert_same(ours, alone(ragged, seen, **options), ragged.tensors, retain_graph=True)
    query, key, value, rows, _ = ragged.padded()
    padded = attention(query, key, value, ragged.mask(seen), enable_gqa=True, **options).transpose(1, 2)[rows]
    assert_same(ours, padded, ragged.tensors)


@given(batches(), OPTIONS)
def test_statistics_are_those_of_the_padded_batch_with_a_mask(problem, options):
    ragged, seen = problem
    options = {"enable_gqa": True, **options}
    query, key, *_ = ragged.padded()
    expected = score_stats(query, key, attn_mask=ragged.mask(seen), **options)
    q, k, v = ragged.nested()
    output, stats = attention_with_stats(q, k, v, seen, **options)
    torch.testing.assert_close(output.values(), attention(q, k, v, seen, **options).values())
    for found in (score_stats(q, k, attn_mask=seen, **options), stats):
        assert found.exact
        assert_same_statistics(found, expected)
    moments = score_moments(q, k, attn_mask=seen, **options)
    if int(expected.count.sum()):
        torch.testing.assert_close(moments.variance, expected.variance)
        torch.testing.assert_close(moments.variance_within_rows, expected.variance_within_rows)


@given(batches(), st.sampled_from([None, 1, 3]), st.booleans())
def test_packed_tokens_equal_nested_tensors(problem, left, is_causal):
    ragged, _ = problem
    window = (-1 if left is None else left, -1)
    seen = Visibility(0 if is_causal else None, None if left is None else -left, from_the_end=True)
    options = {"is_causal": is_causal, "enable_gqa": True, "window_size": window}
    ours = attention_varlen(*ragged.tensors, *ragged.starts, **options)
    assert_same(ours, packed(attention(*ragged.nested(), seen, enable_gqa=True)), ragged.tensors)
    starts = (offsets.int() for offsets in ragged.starts)
    output, stats = attention_varlen_with_stats(*ragged.tensors, *starts, **options)
    torch.testing.assert_close(output, ours)
    assert_same_statistics(stats, score_stats(*ragged.nested()[:2], attn_mask=seen, enable_gqa=True))


@pytest.mark.parametrize("name", RULES)
def test_every_rule_scales_a_sequence_as_if_it_were_alone(name):
    ragged = batch(LENGTHS, LENGTHS, heads=3, head_dim=11, requires_grad=True)
    rule = EXAMPLES[name].make(3, 3, 11)
    ours = packed(attention(*ragged.nested(), is_causal=True, scale=rule))
    if name == "calibrated":  # over all sequences, as over all entries of a batch
        variance = score_moments(*ragged.nested()[:2], scale="unscaled").variance
        torch.testing.assert_close(ours, alone(ragged, Visibility.causal(), scale=variance.rsqrt().view(-1, 1, 1)))
    else:
        assert_same(ours, alone(ragged, Visibility.causal(), scale=rule), ragged.tensors)


def test_a_users_own_rule_gets_one_sequence_after_the_other():
    seen = []

    def rule(query, key, visible=None):
        seen.append((query.shape[-2], key.shape[-2], visible.tolist()))
        return query, key, 1.0 / query.shape[-2]

    ragged = batch([2, 3], [3, 3])
    ours = packed(attention(*ragged.nested(), scale=rule))
    assert seen == [(2, 3, [3, 3]), (3, 3, [3, 3, 3])]
    torch.testing.assert_close(ours, alone(ragged, None, scale=lambda q, k, visible: (q, k, 1 / q.shape[-2])))


def test_a_scale_may_be_a_tensor_of_heads_or_of_sequences():
    ragged = batch([2, 3], [2, 3])
    scale = torch.rand(2, 2, 1, 1, dtype=torch.float64)
    for made in (scale, scale[:1], scale[0]):
        ours = packed(attention(*ragged.nested(), scale=made))
        pairs = zip(ragged.alone(), made.expand(2, 2, 1, 1), strict=True)
        torch.testing.assert_close(ours, torch.cat([as_tokens(attention(*part, scale=own)) for part, own in pairs]))


@OTHERS_MAY_WARN
def test_nested_tensors_mean_what_they_mean_in_sdpa():
    q, k, v = batch(LENGTHS[2:], [4, 2, 6]).nested()
    torch.testing.assert_close(attention(q, k, v).values(), F.scaled_dot_product_attention(q, k, v).values())
    first, last = causal_upper_left(6, 7), causal_lower_right(6, 7)
    for bias, seen in ((first, Visibility.causal()), (last, Visibility.causal(from_the_end=True))):
        torch.testing.assert_close(attention(q, k, v, bias).values(), attention(q, k, v, seen).values())
    even = torch.nested.nested_tensor_from_jagged(torch.randn(5, 7, 3), torch.tensor([0, 2, 5]))  # ragged before heads
    torch.testing.assert_close(attention(even, even, even).values(), attention(*[even.values()] * 3))


def test_the_output_adds_to_the_query_and_is_a_query_again():
    q, k, v = batch(LENGTHS, LENGTHS, value_dim=3).nested()
    output = attention(q, k, v) + q
    assert attention(output, k, v).shape == q.shape


@OTHERS_MAY_WARN
def test_strided_and_narrowed_nested_tensors_are_supported():
    ragged = batch([3, 5, 2], [3, 5, 2])
    strided = [
        torch.nested.as_nested_tensor([part[0] for part in parts]) for parts in zip(*ragged.alone(), strict=True)
    ]
    output = attention(*strided, is_causal=True)
    assert output.layout is torch.strided
    tokens = torch.cat([part.transpose(0, 1) for part in output.unbind()])
    torch.testing.assert_close(tokens, alone(ragged, Visibility.causal()))
    wide, lengths = torch.randn(3, 6, 2, 3), torch.tensor([3, 5, 2])
    holes = torch.nested.narrow(wide, 1, torch.zeros(3, dtype=torch.long), lengths, layout=torch.jagged).transpose(1, 2)
    for at, output in enumerate(attention(holes, holes, holes, is_causal=True).unbind()):
        part = wide[at : at + 1, : lengths[at]].transpose(1, 2)
        torch.testing.assert_close(output, attention(part, part, part, is_causal=True)[0])
    weights = attention_weights(*ragged.nested()[:2], is_causal=True)
    for matrix, (query, key, _) in zip(weights.unbind(), ragged.alone(), strict=True):
        torch.testing.assert_close(matrix, attention_weights(query, key, is_causal=True)[0])


def test_a_plain_tensor_beside_nested_ones_is_sequences_of_one_length():
    ragged = batch([4, 4], [3, 5])
    _, key, value = ragged.nested()
    plain = ragged.padded()[0]
    torch.testing.assert_close(attention(plain, key, value).values(), attention(*ragged.nested()).values())
    torch.testing.assert_close(attention(plain[:1], key, value).unbind()[0], attention(plain, key, value).unbind()[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_starts_are_whole_numbers_of_any_size(dtype):
    ragged = batch(LENGTHS, LENGTHS)
    options = {"is_causal": True, "scale": "log_length"}
    ours, stats = attention_varlen_with_stats(*ragged.tensors, ragged.starts[0].to(dtype), **options, rows=9)
    torch.testing.assert_close(ours, attention_varlen(*ragged.tensors, ragged.starts[0], **options))
    assert stats.rows.tolist() == [9, 9]


def test_documents_packed_in_a_row_are_sequences():
    ragged = batch(LENGTHS, LENGTHS)
    ids = torch.tensor([3, 3, 3, 0, 0, 0, 0, 0, 0, 0, 1, 2, 2, 2, 2])
    options = {"document_ids": ids, "is_causal": True, "scale": "log_length"}
    ours, stats = attention_varlen_with_stats(*ragged.tensors, **options)
    torch.testing.assert_close(ours, alone(ragged, Visibility.causal(), scale="log_length"))
    torch.testing.assert_close(ours, attention_varlen(*ragged.tensors, **options))
    row, seen = [as_one_row(tokens) for tokens in ragged.tensors], Visibility.of_documents(ids, is_causal=True)
    output, of_row = attention_with_stats(*row, seen, scale="log_length")
    torch.testing.assert_close(as_tokens(output), ours)
    assert_same_statistics(of_row, stats)


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


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_autocast_casts_every_sequence(softcap):
    ragged = batch(LENGTHS, LENGTHS, dtype=torch.float32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours = packed(attention(*ragged.nested(), is_causal=True, softcap=softcap))
        expected = alone(ragged, Visibility.causal(), softcap=softcap)
        output, stats = attention_with_stats(*ragged.nested(), is_causal=True, softcap=softcap)
    assert ours.dtype == output.dtype == torch.bfloat16
    assert_same(ours, expected, ragged.tensors)
    expected = score_stats(*ragged.nested()[:2], is_causal=True, softcap=softcap)
    torch.testing.assert_close(stats.std, expected.std)


def test_dropout_keeps_the_mean():
    q, k, v = batch([40, 60], [40, 60], heads=4, value_dim=3).nested()
    dropped = torch.stack([attention(q, k, v, dropout_p=0.3).values() for _ in range(40)])
    assert float((dropped.mean(0) - attention(q, k, v).values()).abs().mean()) < 0.1
    assert float(dropped.var(0).mean()) > 0


def test_memory_is_linear_in_tokens():
    sizes = {"heads": 2, "head_dim": 8, "value_dim": 8, "dtype": torch.float32, "requires_grad": True}
    ragged = batch([211, 307, 5, 401], [211, 307, 5, 401], **sizes)
    with LargestTensor() as largest:
        output, stats = attention_varlen_with_stats(*ragged.tensors, ragged.starts[0], is_causal=True)
        output.sum().backward()
        attention_varlen(*ragged.tensors, ragged.starts[0], window_size=(7, 0), scale="log_length").sum().backward()
        some = attention_varlen_with_stats(*ragged.tensors, ragged.starts[0], rows=64)[1]
        assert float(stats.entropy.sum() + some.entropy.sum()) > 0
    assert largest.elements < 2 * 2 * 401 * 401  # two buffers of the scores of the longest sequence
    many = batch([16] * 200, [16] * 200, **sizes)
    with LargestTensor() as largest:
        attention_varlen(*many.tensors, many.starts[0]).sum().backward()
    assert largest.elements <= 3 * 3200 * 2 * 8


@pytest.mark.usefixtures("flash_on_a_cpu")
@pytest.mark.parametrize("seen", SEEN[2:])
@pytest.mark.parametrize("kv_lens", [[3, 7, 1], [4, 9, 5]])
def test_windows_of_the_gpu_kernel_match_each_sequence_alone(seen, kv_lens):
    ragged = batch([3, 7, 1], kv_lens, heads=4, kv_heads=2, head_dim=8, value_dim=8)
    call = packed_call(*ragged.tensors, (*ragged.starts, None, None, None), seen, None, True, None, 0.0)
    if running.kernel_window(call) is None:
        assert kv_lens != ragged.q_lens  # and it counts from the start
        return
    torch.testing.assert_close(as_tokens(running.attend_sequences(call)), alone(ragged, seen))


def jagged(lengths, width=None):
    q, k, v = batch(lengths, lengths).nested()
    return (q, k, v) if width is None else torch.nested.nested_tensor_from_jagged(
        torch.randn(sum(lengths), width), torch.tensor([0, *lengths]).cumsum(0)
    )  # fmt: skip


def varlen(*starts, **options):
    return attention_varlen(*batch([3, 5], [3, 5]).tensors, *(torch.tensor(each) for each in starts), **options)


def module(*flags, **options):
    x = jagged([2, 3], 12)
    return MultiheadAttention(12, 3, **dict.fromkeys(flags, True))(x, x, x, **options)


q, k, v = jagged([3, 5])
REFUSED = {
    "no mask with nested tensors": lambda: attention(q, k, v, torch.ones(5, 5, dtype=torch.bool)),
    "Explicit attn_mask should not be set": lambda: attention(q, k, v, Visibility.causal(), is_causal=True),
    "one value per key in every sequence": lambda: attention(q, k, jagged([3, 4])[2]),
    "3 sequences in query, like the other": lambda: attention(q, *jagged([1, 2, 3])[1:]),
    "put heads before the length": lambda: attention(q.transpose(1, 2), k, v),
    "nested like the other tensors": lambda: attention(q, k, torch.randn(5, 3)),
    "whole number of at least 1": lambda: score_stats(q, k, rows=0),
    "packed tokens": lambda: attention_varlen(q, k, v, torch.tensor([0, 8])),
    "either cu_seqlens_q or document_ids": varlen,
    "begin with 0 and never": lambda: varlen([0, 5, 3, 8]),
    "last offset to equal the query's 8 tokens": lambda: varlen([0, 5]),
    "last offset to equal the key's 8 tokens": lambda: varlen([0, 8], [0, 5]),
    "whole numbers": lambda: varlen([0.0, 8.0]),
    "equally many key and query sequences": lambda: varlen([0, 8], [0, 3, 8]),
    "document_ids for each of the 8 tokens": lambda: varlen(document_ids=torch.zeros(7)),
    "numbers of keys, −1 for all": lambda: varlen([0, 8], window_size=(-2, 0)),
    "batch_first=True": module,
    "got one; pass is_causal": lambda: module("batch_first", attn_mask=torch.ones(3, 3).bool()),
    "no add_bias_kv and no add_zero_attn with": lambda: module("batch_first", "add_bias_kv"),
    "no add_zero_attn with nested": lambda: module("batch_first", "add_zero_attn"),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_ragged_batch_that_does_not_fit_is_refused_with_a_sentence(sentence):
    with pytest.raises(AttnscaleError, match=sentence):
        REFUSED[sentence]()


@OTHERS_MAY_WARN
@pytest.mark.parametrize("options", [{}, {"scale": "QKNorm"}, {"softcap": 2.0}])
@pytest.mark.parametrize("need_weights", [False, True])
def test_the_module_equals_each_sequence_alone(options, need_weights):
    layer = MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64, **options)
    tokens = torch.randn(15, 12, dtype=torch.float64, requires_grad=True)
    nested = torch.nested.nested_tensor_from_jagged(tokens, torch.tensor([0, *LENGTHS]).cumsum(0))
    output, weights = layer(nested, nested, nested, need_weights=need_weights, is_causal=True)
    parts = tokens.split(LENGTHS)
    expected = [layer(part, part, part, need_weights=need_weights, is_causal=True) for part in parts]
    together = torch.cat([each for each, _ in expected])
    assert_same(output.values(), together, [tokens, *layer.parameters()])
    if need_weights:
        torch.testing.assert_close(list(weights.unbind()), [each for _, each in expected])
    strided = torch.nested.as_nested_tensor([part.detach() for part in parts])
    again, _ = layer(strided, strided, strided, need_weights=False, is_causal=True)
    torch.testing.assert_close(torch.cat(again.unbind()), together)


@OTHERS_MAY_WARN
@pytest.mark.parametrize("shared", ["query", "key", "value", "key and value"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_batch_of_one_sequence_is_shared_by_all(shared, layout, heads):
    keys = [4] * 5 if shared != "query" else [2, 5, 1, 4, 3]
    parts = {
        "query": [torch.randn(3, length, 8) for length in (3, 1, 6, 2, 4)],
        "key": [torch.randn(heads, length, 8) for length in keys],
        "value": [torch.randn(3, length, 5) for length in keys],
    }
    for name in shared.split(" and "):
        parts[name] = [parts[name][0]] * 5
    alone = [attention(*(part.unsqueeze(0) for part in each))[0] for each in zip(*parts.values(), strict=True)]
    some = [each[:1] if name in shared.split(" and ") else each for name, each in parts.items()]
    nested = [
        torch.nested.nested_tensor([part.transpose(0, 1) for part in each], layout=layout).transpose(1, 2)
        for each in some
    ]
    output, stats = attention_with_stats(*nested)
    torch.testing.assert_close(list(output.unbind()), alone)
    assert stats.rows.tolist() == [sum(part.shape[1] for part in parts["query"])] * 3
