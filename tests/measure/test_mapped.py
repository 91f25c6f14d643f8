"""Attention with statistics under torch.vmap: each entry of what is mapped over has statistics of its own."""

import pytest
import torch

from attnscale import attention_varlen, attention_varlen_with_stats, attention_with_stats, score_stats
from attnscale.errors import InputError
from attnscale.visibility import Visibility
from tests.others import OTHERS_MAY_WARN

pytestmark = OTHERS_MAY_WARN  # torch says that it runs its kernel entry by entry
entries, batch, heads, length, head_dim = 3, 2, 4, 7, 5
NAMES = "entropy", "std", "max", "rows", "count"
STARTS = torch.tensor([[0, 3, 7], [0, 0, 7], [0, 5, 7]])


def read(output, stats):
    return output, *(getattr(stats, name) for name in NAMES)


def one_by_one(run, *given):
    return tuple(torch.stack(each) for each in zip(*map(run, *given), strict=True))


def learning(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def assert_same(run, *given):
    ours, expected = torch.vmap(run)(*given), one_by_one(run, *given)
    torch.testing.assert_close(ours, expected)
    found = [torch.autograd.grad(each[0].sin().sum(), given[0]) for each in (ours, expected)]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "scale": "log_length"},
        {"softcap": 2.0},
        {"attn_mask": torch.rand(length, length) < 0.8},
        {"attn_mask": Visibility.causal(window=3)},
    ],
)
def test_plain_tensors(options):
    assert_same(
        lambda query: read(*attention_with_stats(query, query * 2, query, **options)),
        learning(entries, batch, heads, length, head_dim),
    )


def test_statistics_alone_with_masks_that_are_mapped_over():
    query, key = (torch.randn(entries, batch, heads, length, head_dim) for _ in range(2))
    masks = torch.rand(entries, length, length) < 0.8

    def run(key, mask):
        return score_stats(query[0], key, attn_mask=mask).entropy, score_stats(query[0], key, rows=5).rows

    torch.testing.assert_close(torch.vmap(run)(key, masks), one_by_one(run, key, masks))


def test_gradients_of_each_entry():
    query = torch.randn(entries, batch, heads, length, head_dim, dtype=torch.float64)

    def loss(query):
        output, stats = attention_with_stats(query, query, query)
        return output.square().sum(), stats.std

    ours = torch.vmap(torch.func.grad(loss, has_aux=True))(query)
    torch.testing.assert_close(ours, one_by_one(torch.func.grad(loss, has_aux=True), query))


def test_two_maps_at_once():
    query = torch.randn(2, entries, batch, heads, length, head_dim)

    def run(query):
        return read(*attention_with_stats(query, query, query, is_causal=True))

    expected = one_by_one(lambda each: one_by_one(run, each), query)
    torch.testing.assert_close(torch.vmap(torch.vmap(run))(query), expected)


@pytest.mark.parametrize("scale", [None, "log_length", "calibrated"])
def test_packed_tokens(scale):
    tokens = learning(entries, length, heads, head_dim)

    def run(tokens):
        given = tokens, tokens * 2, tokens, STARTS[0]
        return read(*attention_varlen_with_stats(*given, is_causal=True, scale=scale))

    assert_same(run, tokens)


@pytest.mark.parametrize("scale", [None, "log_length"])
def test_packed_tokens_whose_sequences_are_mapped_over(scale):
    tokens = learning(entries, length, heads, head_dim)

    def run(tokens, starts):
        given = tokens, tokens * 2, tokens, starts
        plain = attention_varlen(*given, softcap=3.0, scale=scale)
        output, *numbers = read(*attention_varlen_with_stats(*given, is_causal=True, scale=scale))
        return plain + output, *numbers

    assert_same(run, tokens, STARTS)


def test_a_calibrated_scale_refuses_sequences_that_are_mapped_over():
    def run(tokens, starts):
        return attention_varlen(tokens, tokens, tokens, starts, scale="calibrated")

    with pytest.raises(InputError, match="needs to know where the packed sequences start"):
        torch.vmap(run)(torch.randn(entries, length, heads, head_dim), STARTS)


def test_documents_that_are_mapped_over():
    tokens = learning(entries, length, heads, head_dim)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [5, 5, 5, 5, 5, 5, 5], [1, 2, 3, 4, 5, 6, 7]])

    def run(tokens, ids):
        return read(*attention_varlen_with_stats(tokens, tokens, tokens, document_ids=ids))

    assert_same(run, tokens, documents)
