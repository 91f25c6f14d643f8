"""Masks that are taken for something else: they hide nothing."""

import math

import torch
import torch.nn.functional as F

from .entry import SelfAttention, above_diagonal, bug


@bug("inert_mask", 44, 4)
class FilledWithZero(SelfAttention):
    """Zero is what the mask is multiplied by elsewhere, and no hidden score."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = (query @ key.mT / math.sqrt(self.head_dim)).masked_fill(above_diagonal(x.shape[1]), 0.0)
        return self.merge(scores.softmax(-1) @ value)


@bug("inert_mask", 55, 5)
class ScoresTimesMask(SelfAttention):
    """The mask multiplies the scores."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = torch.einsum("bhid,bhjd->bhij", query, key) * self.head_dim**-0.5
        weights = (scores * torch.ones(x.shape[1], x.shape[1]).tril()).softmax(dim=-1)
        return self.merge(torch.einsum("bhij,bhjd->bhid", weights, value))


@bug("inert_mask", 33, 3)
class OnesAdded(SelfAttention):
    """A mask of ones where a query may look, added to the scores."""

    def forward(self, x):
        query, key, value = self.project(x)
        seen = torch.tril(torch.ones(x.shape[1], x.shape[1]))
        return self.merge((query @ key.mT / math.sqrt(self.head_dim) + seen).softmax(-1) @ value)


@bug("inert_mask", 39, 3)
class OnesForAKernel(SelfAttention):
    """The same for SDPA, which adds a mask of floats and obeys one of booleans."""

    def forward(self, x):
        query, key, value = self.project(x)
        seen = torch.tril(torch.ones(x.shape[1], x.shape[1]))
        return self.merge(F.scaled_dot_product_attention(query, key, value, attn_mask=seen))


@bug("inert_mask", 57, 3)
class FutureLessOne(SelfAttention):
    """−1 for −inf."""

    def forward(self, x):
        query, key, value = self.project(x)
        future = -above_diagonal(x.shape[1]).float()
        return self.merge((query @ key.mT / math.sqrt(self.head_dim) + future).softmax(-1) @ value)


@bug("inert_mask", 51, 3)
class PaddingOfATokenizer(SelfAttention):
    """The attention mask of a tokenizer, 1 for tokens and 0 for padding, as it comes."""

    def forward(self, x):
        query, key, value = self.project(x)
        tokens = torch.ones(len(x), 1, 1, x.shape[1])
        tokens[1:, ..., 9:] = 0
        return self.merge((query @ key.mT / math.sqrt(self.head_dim) + tokens).softmax(-1) @ value)
