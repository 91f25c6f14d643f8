"""Whatever says which keys are seen: masks of any rank, torch's CausalBias, a Visibility; each means a matrix."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from attnscale import MultiheadAttention, Visibility, attention, attention_weights, attention_with_stats, score_stats
from attnscale.errors import InputError, ShapeError
from tests.measure.oracle import NAMES

BATCH, HEADS, Q_LEN, KV_LEN, HEAD_DIM = 2, 3, 5, 7, 11
ROWS, KEYS = torch.arange(Q_LEN).unsqueeze(-1), torch.arange(KV_LEN)
OWN = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
THEIRS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]])
SEVERAL = torch.tensor([True, False, True, True, False, True, True])
AHEAD = KV_LEN - Q_LEN

# what is passed, and the mask written out
MASKS = {
    "of one dimension": (SEVERAL, SEVERAL.expand(Q_LEN, -1)),
    "of one dimension, added": (KEYS * -0.5, (KEYS * -0.5).expand(Q_LEN, -1)),
    "of no dimension": (torch.tensor(True), torch.ones(Q_LEN, KV_LEN, dtype=torch.bool)),
    "causal to the first key": (causal_upper_left(Q_LEN, KV_LEN), ROWS >= KEYS),
    "causal to the last key": (causal_lower_right(Q_LEN, KV_LEN), ROWS + AHEAD >= KEYS),
    "an offset": (Visibility.causal(1), ROWS + 1 >= KEYS),
    "a window": (Visibility.causal(window=2), (ROWS >= KEYS) & (KEYS > ROWS - 2)),
    "a window to the last key": (
        Visibility.causal(window=3, from_the_end=True),
        (ROWS + AHEAD >= KEYS) & (KEYS > ROWS + AHEAD - 3),
    ),
    "documents": (Visibility.of_documents(OWN, THEIRS), OWN[:, None, :, None] == THEIRS[:, None, None, :]),
    "causal and a mask": (Visibility(last=0, mask=SEVERAL[None]), (ROWS >= KEYS) & SEVERAL),
}


def qkv(**options):
    return tuple(torch.randn(BATCH, HEADS, length, HEAD_DIM, **options) for length in (Q_LEN, KV_LEN, KV_LEN))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("scale", [None, "log_length"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_every_way_of_saying_it_means_its_matrix(name, scale, softcap):
    passed, written = MASKS[name]
    query, key, value = qkv(requires_grad=True)
    options = {"scale": scale, "softcap": softcap}
    ours = attention(query, key, value, passed, **options)
    expected = attention(query, key, value, written, **options)
    torch.testing.assert_close(ours, expected)
    weight = torch.randn_like(ours)
    torch.testing.assert_close(*(torch.autograd.grad(out, (query, key, value), weight) for out in (ours, expected)))
    torch.testing.assert_close(
        attention_weights(query, key, passed, **options), attention_weights(query, key, written, **options)
    )
    for rows in (None, 3):
        stats = score_stats(query, key, attn_mask=passed, rows=rows, **options)
        also = attention_with_stats(query, key, value, passed, rows=rows, **options)[1]
        exact = score_stats(query, key, attn_mask=written, **options)
        for each in (stats, also) if rows is None else ():
            for statistic in NAMES:
                torch.testing.assert_close(getattr(each, statistic), getattr(exact, statistic), equal_nan=True)
        assert (stats.max <= exact.max + 1e-6).all()


@pytest.mark.parametrize("name", ["causal to the first key", "causal to the last key"])
def test_a_causal_bias_gives_what_sdpa_gives(name):
    query, key, value = qkv()
    bias = MASKS[name][0]
    torch.testing.assert_close(
        attention(query, key, value, bias), F.scaled_dot_product_attention(query, key, value, bias)
    )


@pytest.mark.parametrize("shape", [(4, 1, 1, KV_LEN), (1, 5, 1, KV_LEN), (5, 1, KV_LEN)])
def test_log_length_counts_the_keys_of_a_mask_that_is_the_same_for_every_row(shape):
    """One row with a padded cache, and a mask with as many heads as rows: no count of a head is that of a row."""
    q_len = 1 if shape[0] == 4 else 5
    mask = torch.rand(shape) < 0.5 + torch.eye(1, KV_LEN)[0]
    query, key = torch.randn(4, 5, q_len, HEAD_DIM), torch.randn(4, 5, KV_LEN, HEAD_DIM)
    expected = attention(query, key, key, mask.expand(4, 5, q_len, KV_LEN).contiguous(), scale="log_length")
    torch.testing.assert_close(attention(query, key, key, mask, scale="log_length"), expected)


def test_a_mask_of_a_known_length_beside_keys_whose_length_is_a_symbol():
    query, key, value = qkv()
    compiled = torch.compile(lambda *args: attention(*args), backend="aot_eager", fullgraph=True)
    torch._dynamo.maybe_mark_dynamic(key, 2)
    torch._dynamo.maybe_mark_dynamic(value, 2)
    torch.testing.assert_close(compiled(query, key, value, SEVERAL), attention(query, key, value, SEVERAL))


def test_a_single_precision_mask_of_a_double_precision_query_is_read_right():
    """SDPA's kernel for CPUs is off by as much as the output from some forty keys on, in torch 2.11 to 2.13."""
    query, key, value = (torch.randn(1, 2, length, 8, dtype=torch.float64) for length in (40, 41, 41))
    mask = torch.randn(40, 41)
    torch.testing.assert_close(attention(query, key, value, mask), attention(query, key, value, mask.double()))


def test_a_causal_bias_compiles():
    query, key, value = qkv()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal_lower_right(Q_LEN, KV_LEN)), backend="aot_eager")
    expected = attention(query, key, value, causal_lower_right(Q_LEN, KV_LEN))
    torch.testing.assert_close(compiled(query, key, value), expected)


def test_the_last_row_of_a_cache_is_a_plain_attention():
    """A decoding step needs no mask, whatever says that it is causal."""
    assert Visibility.causal(from_the_end=True).within(1, KV_LEN).is_full
    assert Visibility.causal(window=KV_LEN, from_the_end=True).within(1, KV_LEN).is_full
    assert Visibility.causal(from_the_end=True).within(Q_LEN, Q_LEN).is_causal


def test_documents_of_leading_dimensions_fold():
    query, key, value = (torch.randn(2, 3, HEADS, length, HEAD_DIM) for length in (Q_LEN, KV_LEN, KV_LEN))
    own, theirs = torch.randint(0, 2, (2, 3, Q_LEN)), torch.randint(0, 2, (2, 1, KV_LEN))
    same = own[:, :, None, :, None] == theirs[:, :, None, None, :]
    torch.testing.assert_close(
        attention(query, key, value, Visibility.of_documents(own, theirs)), attention(query, key, value, same)
    )


@pytest.mark.parametrize(("lead", "q_len"), [((2, 0), Q_LEN), ((0, 3), Q_LEN), ((2, 3), 0), ((2,), 0)])
def test_documents_of_no_rows_and_of_no_batch_are_none(lead, q_len):
    query, key = torch.randn(*lead, HEADS, q_len, HEAD_DIM), torch.randn(*lead, HEADS, KV_LEN, HEAD_DIM)
    own, theirs = torch.randint(0, 2, (*lead, q_len)), torch.randint(0, 2, (*lead, KV_LEN))
    for seen in (Visibility.of_documents(own, theirs), Visibility(last=1, mask=torch.ones(q_len, KV_LEN) > 0)):
        for scale in (None, "log_length"):
            output, stats = attention_with_stats(query, key, key, seen, scale=scale)
            assert output.shape == attention(query, key, key, seen, scale=scale).shape == query.shape
            assert (
                stats.rows.tolist() == score_stats(query, key, attn_mask=seen, scale=scale).rows.tolist() == [0] * HEADS
            )


def test_what_does_not_fit_gets_a_sentence():
    query, key, value = qkv()
    with pytest.raises(
        ShapeError, match=r"causal_lower_right\(5, 7\) for this number of rows and keys, got .*\(7, 9\)"
    ):
        attention(query, key, value, causal_lower_right(7, 9))
    with pytest.raises(InputError, match="CausalBias should not be used with causal=True"):
        attention(query, key, value, causal_upper_left(Q_LEN, KV_LEN), is_causal=True)
    with pytest.raises(InputError, match="Explicit attn_mask should not be set when is_causal=True"):
        attention(query, key, value, Visibility.causal(), is_causal=True)
    with pytest.raises(ShapeError, match=r"document of each key, broadcasting to \(2, 7\), got \(2, 5\)"):
        score_stats(query, key, attn_mask=Visibility.of_documents(OWN))


def test_the_module_takes_them_too():
    layer = MultiheadAttention(12, 3, batch_first=True, scale="log_length")
    x = torch.randn(2, Q_LEN, 12)
    hidden = torch.ones(Q_LEN, Q_LEN, dtype=torch.bool).triu(1)
    expected = layer(x, x, x, attn_mask=hidden)
    for mask in (causal_upper_left(Q_LEN, Q_LEN), Visibility.causal(from_the_end=True)):
        torch.testing.assert_close(layer(x, x, x, attn_mask=mask), expected)
    with pytest.raises(InputError, match="key_padding_mask"):
        layer(x, x, x, attn_mask=Visibility.causal(), key_padding_mask=torch.zeros(2, Q_LEN, dtype=torch.bool))
