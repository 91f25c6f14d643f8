"""Masks that are taken for something else: they hide nothing."""

import torch
import torch.nn.functional as F

from .entry import Divided, Einsum, SelfAttention, above_diagonal, bug


def ones_below_diagonal(scores):
    return torch.ones(scores.shape[-2:]).tril()


@bug("inert_mask", 44, 4)
class FilledWithZero(Divided):
    """Zero is what the mask is multiplied by elsewhere, and no hidden score."""

    def adjust(self, scores):
        return scores.masked_fill(above_diagonal(scores.shape[-1]), 0.0)


@bug("inert_mask", 55, 5)
class ScoresTimesMask(Einsum):
    """The mask multiplies the scores."""

    def adjust(self, scores):
        return scores * ones_below_diagonal(scores)


@bug("inert_mask", 33, 3)
class OnesAdded(Divided):
    """A mask of ones where a query may look, added to the scores."""

    def adjust(self, scores):
        return scores + ones_below_diagonal(scores)


@bug("inert_mask", 39, 3)
class OnesForAKernel(SelfAttention):
    """Ones for SDPA, which adds a mask of floats and obeys one of booleans."""

    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=torch.ones(13, 13).tril())


@bug("inert_mask", 57, 3)
class FutureLessOne(Divided):
    """−1 for −inf."""

    def adjust(self, scores):
        return scores + -above_diagonal(scores.shape[-1]).float()


@bug("inert_mask", 51, 3)
class PaddingOfATokenizer(Divided):
    """The attention mask of a tokenizer, 1 for tokens and 0 for padding, as it comes."""

    def adjust(self, scores):
        tokens = torch.ones(len(scores), 1, 1, scores.shape[-1])
        tokens[1:, ..., 9:] = 0
        return scores + tokens
