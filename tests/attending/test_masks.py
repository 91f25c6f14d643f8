"""Masks of any rank, torch's CausalBias and a Visibility mean the matrix that each stands for, everywhere."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from attnscale import (
    MultiheadAttention,
    Visibility,
    attention,
    attention_weights,
    attention_with_stats,
    score_stats,
    visibility,
)
from attnscale.attending import row_blocks, sdpa
from attnscale.errors import InputError, ShapeError
from tests.measure.oracle import NAMES
from tests.precision import assert_same

BATCH, HEADS, Q_LEN, KV_LEN, HEAD_DIM = 2, 3, 29, 37, 11
ROWS, KEYS = torch.arange(Q_LEN).unsqueeze(-1), torch.arange(KV_LEN)
AHEAD = KV_LEN - Q_LEN


def generator():
    return torch.Generator().manual_seed(7)


def documents(length):
    return torch.randint(0, 3, (BATCH, length), generator=generator()).sort(-1).values


OWN, THEIRS = documents(Q_LEN), documents(KV_LEN)
SAME = OWN[:, None, :, None] == THEIRS[:, None, None, :]
SEVERAL = torch.rand(KV_LEN, generator=generator()) < 0.7
BOOLEANS = torch.rand(BATCH, 1, Q_LEN, KV_LEN, generator=generator()) < 0.7
FLOATS = torch.randn(1, HEADS, Q_LEN, KV_LEN, generator=generator()).masked_fill(~BOOLEANS[:1], -torch.inf)
PADDING = torch.arange(KV_LEN) < torch.tensor([31, 11]).view(BATCH, 1, 1, 1)


def added(shown, bias=FLOATS):
    return bias.masked_fill(~shown, -torch.inf)


# what is passed, and the mask written out
MASKS = {
    "of one dimension": (SEVERAL, SEVERAL.expand(Q_LEN, -1)),
    "of one dimension, added": (KEYS * -0.5, (KEYS * -0.5).expand(Q_LEN, -1)),
    "of no dimension": (torch.tensor(True), torch.ones(Q_LEN, KV_LEN, dtype=torch.bool)),
    "everything": (Visibility(), torch.ones(Q_LEN, KV_LEN, dtype=torch.bool)),
    "causal to the first key": (causal_upper_left(Q_LEN, KV_LEN), ROWS >= KEYS),
    "causal to the last key": (causal_lower_right(Q_LEN, KV_LEN), ROWS + AHEAD >= KEYS),
    "an offset": (Visibility.causal(1), ROWS + 1 >= KEYS),
    "an offset before the first key": (Visibility.causal(-7), ROWS - 7 >= KEYS),
    "a window": (Visibility.causal(window=11), (ROWS >= KEYS) & (KEYS > ROWS - 11)),
    "a window to the last key": (
        Visibility.causal(window=5, from_the_end=True),
        (ROWS + AHEAD >= KEYS) & (KEYS > ROWS + AHEAD - 5),
    ),
    "a window to both sides": (Visibility(last=3, first=-4), (KEYS <= ROWS + 3) & (KEYS >= ROWS - 4)),
    "no key before the row's own": (Visibility(first=0), KEYS >= ROWS),
    "padding": (Visibility(mask=PADDING), PADDING.expand(-1, -1, Q_LEN, -1)),
    "padding and causal": (Visibility(last=0, mask=PADDING), PADDING & (KEYS <= ROWS)),
    "documents": (Visibility.of_documents(OWN, THEIRS), SAME),
    "documents and causal": (Visibility.of_documents(OWN, THEIRS, is_causal=True), SAME & (KEYS <= ROWS)),
    "a bias": (Visibility(mask=FLOATS), FLOATS),
    "a bias in a window": (Visibility(0, -6, FLOATS), added((KEYS <= ROWS) & (KEYS >= ROWS - 6))),
    "all at once": (
        Visibility(2, -9, PADDING, (OWN, THEIRS)),
        SAME & PADDING & (KEYS <= ROWS + 2) & (KEYS >= ROWS - 9),
    ),
}


def qkv(**options):
    return tuple(torch.randn(BATCH, HEADS, length, HEAD_DIM, **options) for length in (Q_LEN, KV_LEN, KV_LEN))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("scale", [None, "log_length"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("block_rows", [7, 512])
def test_a_mask_means_its_matrix(name, scale, softcap, block_rows, monkeypatch):
    passed, written = MASKS[name]
    query, key, value = qkv(requires_grad=True)
    options = {"scale": scale, "softcap": softcap}
    expected = attention(query, key, value, written, **options)
    exact = score_stats(query, key, attn_mask=written, **options)
    for module, size in ((sdpa, "MASK_ROWS"), (row_blocks, "BLOCK_ROWS"), (visibility, "COUNTING_ROWS")):
        monkeypatch.setattr(module, size, block_rows)
    assert_same(attention(query, key, value, passed, **options), expected, (query, key, value))
    torch.testing.assert_close(
        attention_weights(query, key, passed, **options), attention_weights(query, key, written, **options)
    )
    output, stats = attention_with_stats(query, key, value, passed, **options)
    torch.testing.assert_close(output, expected)
    for found in (stats, score_stats(query, key, attn_mask=passed, **options)):
        for statistic in ("rows", "count", *NAMES):
            torch.testing.assert_close(
                *(getattr(each, statistic) for each in (found, exact)), rtol=1e-5, atol=1e-6, equal_nan=True
            )
    some = score_stats(query, key, attn_mask=passed, rows=3, **options)
    assert (some.max <= exact.max + 1e-6).all()


@pytest.mark.parametrize("bias", [causal_upper_left(Q_LEN, KV_LEN), causal_lower_right(Q_LEN, KV_LEN)])
def test_a_causal_bias_gives_what_sdpa_gives_and_compiles(bias):
    query, key, value = qkv()
    expected = F.scaled_dot_product_attention(query, key, value, bias)
    torch.testing.assert_close(attention(query, key, value, bias), expected)
    run = torch.compile(lambda q, k, v: attention(q, k, v, causal_lower_right(Q_LEN, KV_LEN)), backend="aot_eager")
    expected = attention(query, key, value, causal_lower_right(Q_LEN, KV_LEN))
    torch.testing.assert_close(run(query, key, value), expected)


def test_a_bias_keeps_its_gradient_in_a_window():
    bias = FLOATS.clone().requires_grad_()
    attention(*qkv(), Visibility(last=0, first=-6, mask=bias)).square().sum().backward()
    assert bool((bias.grad.abs() > 0).any())
    assert not bool(bias.grad[..., KEYS > ROWS].any())


@pytest.mark.parametrize("shape", [(4, 1, 1, KV_LEN), (1, 5, 1, KV_LEN), (5, 1, KV_LEN)])
def test_log_length_counts_the_keys_of_a_mask_that_is_the_same_for_every_row(shape):
    """One row with a padded cache, and a mask with as many heads as rows: no count of a head is that of a row."""
    q_len = 1 if shape[0] == 4 else 5
    mask = torch.rand(shape) < 0.5 + torch.eye(1, KV_LEN)[0]
    query, key = torch.randn(4, 5, q_len, HEAD_DIM), torch.randn(4, 5, KV_LEN, HEAD_DIM)
    expected = attention(query, key, key, mask.expand(4, 5, q_len, KV_LEN).contiguous(), scale="log_length")
    torch.testing.assert_close(attention(query, key, key, mask, scale="log_length"), expected)


def test_a_mask_of_static_length_compiles_with_keys_of_dynamic_length():
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


def test_a_decoding_step_needs_no_mask():
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


@pytest.mark.parametrize(("lead", "q_len"), [((2, 0), 5), ((0, 3), 5), ((2, 3), 0), ((2,), 0)])
def test_an_empty_batch_or_no_rows_have_no_statistics(lead, q_len):
    query, key = torch.randn(*lead, HEADS, q_len, HEAD_DIM), torch.randn(*lead, HEADS, KV_LEN, HEAD_DIM)
    own, theirs = torch.randint(0, 2, (*lead, q_len)), torch.randint(0, 2, (*lead, KV_LEN))
    for seen in (Visibility.of_documents(own, theirs), Visibility(last=1, mask=torch.ones(q_len, KV_LEN) > 0)):
        for scale in (None, "log_length"):
            output, stats = attention_with_stats(query, key, key, seen, scale=scale)
            alone = score_stats(query, key, attn_mask=seen, scale=scale)
            assert output.shape == attention(query, key, key, seen, scale=scale).shape == query.shape
            assert stats.rows.tolist() == alone.rows.tolist() == [0] * HEADS


def test_a_mask_that_does_not_fit_is_refused_with_a_sentence():
    query, key, value = qkv()
    with pytest.raises(ShapeError, match=r"causal_lower_right\(29, 37\) for this number of rows and keys, got .*7, 9"):
        attention(query, key, value, causal_lower_right(7, 9))
    with pytest.raises(InputError, match="CausalBias should not be used with causal=True"):
        attention(query, key, value, causal_upper_left(Q_LEN, KV_LEN), is_causal=True)
    with pytest.raises(InputError, match="Explicit attn_mask should not be set when is_causal=True"):
        attention(query, key, value, Visibility.causal(), is_causal=True)
    with pytest.raises(ShapeError, match=r"document of each key, broadcasting to \(2, 37\), got \(2, 29\)"):
        score_stats(query, key, attn_mask=Visibility.of_documents(OWN))


def test_the_module_accepts_a_causal_bias_and_a_visibility():
    layer = MultiheadAttention(12, 3, batch_first=True, scale="log_length")
    x = torch.randn(2, 5, 12)
    expected = layer(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(1))
    for mask in (causal_upper_left(5, 5), Visibility.causal(from_the_end=True)):
        torch.testing.assert_close(layer(x, x, x, attn_mask=mask), expected)
    with pytest.raises(InputError, match="key_padding_mask"):
        layer(x, x, x, attn_mask=Visibility.causal(), key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))
