"""The ways to hide a key."""

import torch

from .bases import Divided, above_diagonal
from .entry import correct


class Masked(Divided):
    """Hides keys by the way of a subclass."""

    def adjust(self, scores):
        return self.mask(scores, above_diagonal(scores.shape[-1]))


@correct(33, 3, causal=True, step="mask", base=Masked)
def filled_with_infinity(self, scores, hidden):
    return scores.masked_fill(hidden, float("-inf"))


@correct(39, 3, causal=True, step="mask", base=Masked)
def filled_in_place(self, scores, hidden):
    return scores.masked_fill_(hidden, -1e9)


@correct(35, 5, causal=True, step="mask", base=Masked)
def filled_with_the_lowest(self, scores, hidden):
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min)


@correct(38, 2, causal=True, step="mask", base=Masked)
def where(self, scores, hidden):
    """GPT-2's, with the lowest number as a tensor."""
    return torch.where(~hidden, scores, torch.full([], torch.finfo(scores.dtype).min))


@correct(46, 2, causal=True, step="mask", base=Masked)
def added(self, scores, hidden):
    return scores + torch.full(hidden.shape, float("-inf")).triu(1)


@correct(51, 3, causal=True, step="mask", base=Masked)
def added_ten_thousand(self, scores, hidden):
    """BERT's: (1 − mask) · −10,000."""
    return scores + (1.0 - (~hidden).float()) * -10000.0


@correct(57, 3, causal=True, step="mask", base=Masked)
def multiplied_then_added(self, scores, hidden):
    """GPT's: w · b − 10,000 · (1 − b)."""
    seen = (~hidden).float()
    return scores * seen + -1e4 * (1 - seen)


@correct(69, 3, causal=True, step="mask", base=Masked)
def indexed(self, scores, hidden):
    """scores[hidden] = −∞."""
    scores[hidden.expand_as(scores)] = -torch.inf
    return scores


@correct(44, 4, causal=True, step="mask", base=Masked)
def added_in_place(self, scores, hidden):
    scores += torch.zeros(hidden.shape).masked_fill_(hidden, -1e9)
    return scores


@correct(52, 4, step="mask", base=Masked)
def twice(self, scores, hidden):
    """A padding mask and a window, one after the other."""
    place = torch.arange(scores.shape[-1])
    scores = scores.masked_fill((place[:, None] - place).abs() > 4, -1e9)
    return scores + torch.where(place < 10, 0.0, torch.finfo(scores.dtype).min / 2)[None, None, None]


@correct(55, 5, causal=True)
class BeforeTheScale(Divided):
    """Masked first and divided after: the mask is divided too, and hides as well."""

    def scale_product(self, product):
        return super().scale_product(product.masked_fill(above_diagonal(product.shape[-1]), -1e20))


@correct(65, 5, step="mask", base=Masked)
def some_rows_see_one_key(self, scores, hidden):
    """A block-diagonal mask of packed documents, one of them a single token."""
    document = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 3, 3])
    return scores.masked_fill(document[:, None] != document, -torch.inf)
