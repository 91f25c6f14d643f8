import pytest
import torch

from attnscale import audit
from attnscale.diagnose.pattern import attention_pattern, pattern_of

from .layers import layer_of


def causal(length, place):
    """Each row of a causal head gives 0.9 to the place it names, and shares out the rest over what it sees."""
    weights = torch.ones(length, length).tril()
    weights = 0.1 * weights / weights.sum(-1, keepdim=True)
    for row in range(length):
        weights[row, max(0, min(row, place(row)))] += 0.9
    return weights


@pytest.mark.parametrize(
    ("place", "kind", "places", "words"),
    [
        (lambda row: row, "itself", (0,), "the token itself"),
        (lambda row: row - 1, "previous token", (-1,), "the token before"),
        (lambda row: row - 3, "offset", (-3,), "at an offset of -3"),
        (lambda row: 0, "sink", (0,), "% of its weight is on key 0 for all queries, a sink"),
        (lambda row: 5, "sink", (5,), "key 5"),
        (lambda row: (row * row * 37 + 11) % 97 % (row + 1), "by content", (), "no position"),
    ],
)
def test_the_pattern_of_a_causal_head(place, kind, places, words):
    found = attention_pattern(causal(40, place), causal=True)
    assert (found.kind, found.places) == (kind, places)
    assert 0 <= found.share <= 1
    assert words in str(found)


def test_queries_that_continue_a_cache_count_from_its_end():
    assert attention_pattern(causal(40, lambda row: row - 1)[-8:]).kind == "previous token"


SEPARATORS = (9, 30, 52)


def test_one_token_that_recurs_is_a_separator_and_others_are_a_few_keys():
    weights = torch.full((60, 60), 0.1 / 60)
    weights[torch.arange(60), torch.tensor(SEPARATORS)[torch.arange(60) % 3]] += 0.9
    tokens = torch.arange(60)
    assert (attention_pattern(weights, tokens).kind, attention_pattern(weights).kind) == ("few keys", "few keys")
    tokens[list(SEPARATORS)] = 7
    found = attention_pattern(weights, tokens)
    assert (found.kind, set(found.places) <= set(SEPARATORS)) == ("separator", True)


def test_few_keys_or_one_query_show_no_pattern():
    assert attention_pattern(torch.eye(3)).kind == "by content"
    assert attention_pattern(causal(3, lambda row: 0), causal=True).kind == "by content"
    assert attention_pattern(causal(5, lambda row: row), causal=True).kind == "itself"
    query, key = torch.randn(1, 1, 1, 11), torch.randn(1, 1, 23, 11)
    assert pattern_of(layer_of(query, key, 50.0), 0) is None
    assert pattern_of(layer_of(query.expand(-1, -1, 5, -1), key, 50.0), 0).kind == "sink"


class RestsOnSeparators(torch.nn.Module):
    """Every query looks at one of three places, in turns, and the norm says that it was trained."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = torch.nn.Embedding(20, 8), torch.nn.LayerNorm(8)
        self.place, self.turn = torch.nn.Parameter(torch.zeros(60, 8)), torch.nn.Parameter(torch.zeros(60, 8))
        with torch.no_grad():
            self.place[SEPARATORS, range(3)] = self.turn[range(60), [row % 3 for row in range(60)]] = 9.0
            self.norm.weight[0] = 1.5

    def forward(self, input_ids, attention_mask=None):
        tokens = self.embedding(input_ids)[:, None]
        attended = torch.nn.functional.scaled_dot_product_attention(tokens + self.turn, tokens + self.place, tokens)
        return self.norm(attended)


@pytest.mark.parametrize("more", [{}, {"attention_mask": torch.ones(1, 60, dtype=torch.int64)}])
def test_a_finding_says_that_a_head_rests_on_separators_where_the_inputs_are_ids(more):
    tokens = 8 + torch.arange(60)[None] % 11
    tokens[:, SEPARATORS] = 7
    (found,) = audit(RestsOnSeparators(), tokens, **more).findings
    assert "on one token that recurs, a separator (keys" in found.message
