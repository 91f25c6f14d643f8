"""Masks that are taken for something else: they hide nothing."""

import torch
import torch.nn.functional as F

from .bases import Divided, Einsum, above_diagonal
from .entry import bug


def ones_below_diagonal(scores):
    return torch.ones(scores.shape[-2:]).tril()


@bug("inert_mask", 44, 4, step="adjust", base=Divided)
def filled_with_zero(self, scores):
    """Zero is what the mask is multiplied by elsewhere, and no hidden score."""
    return scores.masked_fill(above_diagonal(scores.shape[-1]), 0.0)


@bug("inert_mask", 55, 5, step="adjust", base=Einsum)
def scores_times_mask(self, scores):
    """The mask multiplies the scores."""
    return scores * ones_below_diagonal(scores)


@bug("inert_mask", 33, 3, step="adjust", base=Divided)
def ones_added(self, scores):
    """A mask of ones where a query may look, added to the scores."""
    return scores + ones_below_diagonal(scores)


@bug("inert_mask", 39, 3, step="attend")
def ones_for_a_kernel(self, query, key, value):
    """Ones for SDPA, which adds a mask of floats and obeys one of booleans."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=torch.ones(13, 13).tril())


@bug("inert_mask", 57, 3, step="adjust", base=Divided)
def future_less_one(self, scores):
    """−1 for −inf."""
    return scores + -above_diagonal(scores.shape[-1]).float()


@bug("inert_mask", 51, 3, step="adjust", base=Divided)
def padding_of_a_tokenizer(self, scores):
    """The attention mask of a tokenizer, 1 for tokens and 0 for padding, as it comes."""
    tokens = torch.ones(len(scores), 1, 1, scores.shape[-1])
    tokens[1:, ..., 9:] = 0
    return scores + tokens
