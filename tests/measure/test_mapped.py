"""torch.vmap maps over attention, and is refused for statistics."""

import pytest
import torch

from attnscale import attention_varlen, attention_with_stats, score_stats
from attnscale.errors import InputError
from tests.others import OTHERS_MAY_WARN

pytestmark = OTHERS_MAY_WARN  # torch says that it runs its kernel entry by entry
entries, batch, heads, length, head_dim = 3, 2, 4, 7, 5
TOKENS = torch.randn(entries, length, heads, head_dim)
STARTS = torch.tensor([[0, 3, 7], [0, 0, 7], [0, 5, 7]])


def attended(query):
    return attention_with_stats(query, query, query)[1].entropy


def measured(query):
    return score_stats(query, query, rows=5).entropy


@pytest.mark.parametrize("run", [attended, measured])
def test_statistics_under_vmap_are_refused(run):
    with pytest.raises(InputError, match="outside torch"):
        torch.vmap(run)(torch.randn(entries, batch, heads, length, head_dim))


def test_vmap_maps_over_starts():
    def run(tokens, starts):
        return attention_varlen(tokens, tokens, tokens, starts)

    expected = torch.stack([run(*each) for each in zip(TOKENS, STARTS, strict=True)])
    torch.testing.assert_close(torch.vmap(run)(TOKENS, STARTS), expected)


def test_tokens_of_the_same_sequences_are_mapped_over():
    def run(tokens):
        return attention_varlen(tokens, tokens * 2, tokens, STARTS[0], is_causal=True)

    torch.testing.assert_close(torch.vmap(run)(TOKENS), torch.stack([run(each) for each in TOKENS]))
