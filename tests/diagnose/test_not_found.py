"""The limits that docs/findings.md names: mistakes that pass without a word. Who mends one takes it off the list."""

import pytest
import torch

from attnscale import audit
from tests.zoo.entry import Block, SelfAttention, above_diagonal


class Attention(SelfAttention):
    """As printed, with scores and values to be changed."""

    def forward(self, x):
        query, key, value = self.project(x)
        weights = self.change(query @ key.mT / self.head_dim**0.5).softmax(-1)
        return self.merge(weights @ value)

    def change(self, scores):
        return scores


class MaskTransposed(Attention):
    def change(self, scores):
        return scores.masked_fill(above_diagonal(13).T, -torch.inf)


class MaskOffByOne(Attention):
    def change(self, scores):
        return scores.masked_fill(torch.ones(13, 13, dtype=torch.bool).triu(2), -torch.inf)


class RowHiddenByAFiniteMask(Attention):
    def change(self, scores):
        return scores.masked_fill(torch.ones(13, 13, dtype=torch.bool).triu(0), -1e9)


class HeadsMergedInTheWrongOrder(Attention):
    def merge(self, x):
        return self.out_proj(x.reshape(x.shape[0], x.shape[2], -1))


class KeyIsTheQuery(Attention):
    def project(self, x):
        query, _, value = super().project(x)
        return query, query, value


class QueryFrozen(Attention):
    def __init__(self, *args):
        super().__init__(*args)
        self.q_proj.requires_grad_(False)


@pytest.mark.parametrize(
    "kind",
    [MaskTransposed, MaskOffByOne, RowHiddenByAFiniteMask, HeadsMergedInTheWrongOrder, KeyIsTheQuery, QueryFrozen],
)
def test_a_limit_that_is_documented_is_one(kind):
    assert audit(Block(44, kind(44, 4)), torch.randn(2, 13, 44)).findings == []
