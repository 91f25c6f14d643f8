"""Designs that do something to the weights between the softmax and the values; all of them are right.

What cannot be read of them may be said in a note; none gets a warning or an error.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .bases import Divided, SelfAttention
from .entry import UNREAD, correct


@correct(42, 3, scale=7**-0.5, layers=2, seen_dim=7, statistics="none")
class Differential(SelfAttention):
    """Two softmaxes of half the features each, one taken off the other by a learned λ."""

    def add_parts(self):
        self.lam = nn.Parameter(torch.tensor(0.8))

    def attend(self, query, key, value):
        (q1, q2), (k1, k2) = query.chunk(2, -1), key.chunk(2, -1)
        scale = q1.shape[-1] ** -0.5
        first, second = (q1 @ k1.mT * scale).softmax(-1), (q2 @ k2.mT * scale).softmax(-1)
        return (first - self.lam * second) @ value


@correct(51, 3, statistics="none", step="weigh", base=Divided)
def off_by_one(self, scores):
    """Softmax plus one: a zero among the scores, which takes what no key wants."""
    return F.softmax(F.pad(scores, (1, 0)), dim=-1)[..., 1:]


@correct(48, 3, statistics="none", **{name: UNREAD[name] for name in ("seen_heads", "seen_dim", "calls", "scale")})
class OffByOneByHand(Divided):
    """e / (1 + Σe), written out."""

    def weigh(self, scores):
        top = scores.amax(-1, keepdim=True).clamp(min=0)
        powers = torch.exp(scores - top)
        return powers / (powers.sum(-1, keepdim=True) + torch.exp(-top))


@correct(39, 3, statistics="none")
class GatedByHead(SelfAttention):
    """A sigmoid of the input multiplies what each head mixed."""

    def add_parts(self):
        self.gate = nn.Linear(self.heads * self.head_dim, self.heads * self.head_dim)

    def forward(self, x):
        return self.merge(self.attend(*self.project(x)) * self.split(self.gate(x)).sigmoid())


@correct(57, 3, statistics="none", scale=None)
class Forgetting(SelfAttention):
    """A learned decay: log-sigmoids of the input, summed from key to query, added to the scores."""

    def add_parts(self):
        self.forget = nn.Linear(self.heads * self.head_dim, self.heads)

    def forward(self, x):
        query, key, value = self.project(x)
        decay = F.logsigmoid(self.forget(x)).transpose(1, 2).cumsum(-1)
        scores = query @ key.mT / math.sqrt(self.head_dim) + decay[..., :, None] - decay[..., None, :]
        return self.merge(scores.softmax(-1) @ value)


@correct(36, 3, statistics="none", scale=None, calls=None, seen_heads=None, seen_dim=None)
class TriangleAttention(SelfAttention):
    """AlphaFold's over pairs: rows of a square of pairs, a bias from the pairs themselves, gated."""

    def add_parts(self):
        self.bias, self.gate = nn.Linear(36, self.heads, bias=False), nn.Linear(36, 36)

    def forward(self, x):
        pairs = x[:, :, None] + x[:, None, :]
        query, key, value = (
            p(pairs).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = query * self.head_dim**-0.5 @ key.mT + self.bias(pairs).permute(0, 3, 1, 2)[:, None]
        mixed = (scores.softmax(-1) @ value).transpose(-2, -3).flatten(-2)
        return self.out_proj(mixed * self.gate(pairs).sigmoid()).mean(2)


class Masked(Divided):
    """Half the keys of the second sequence are padding."""

    def weigh(self, scores):
        length = scores.shape[-1]
        shown = torch.arange(length) < torch.tensor([length, 6])[:, None]
        return self.weights(scores, shown[:, None, None])


@correct(33, 3, statistics="none", step="weights", base=Masked)
def masked_then_normalised(self, scores, shown):
    """Weights times the mask, over what is left of their sum."""
    weights = scores.softmax(-1) * shown
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)


@correct(39, 3, statistics="none", step="weights", base=Masked)
def masked_twice(self, scores, shown):
    """Before the softmax, and once more behind it, where nothing is left to hide."""
    return scores.masked_fill(~shown, -1e9).softmax(-1).masked_fill(~shown, 0.0)


@correct(51, 3, statistics="none", step="weights", base=Masked)
def empty_rows_set_to_zero(self, scores, shown):
    """Rows without a key are NaN, and set to zero before they meet the values."""
    hidden = ~(shown & shown.transpose(-2, -1))
    return torch.nan_to_num(scores.masked_fill(hidden, -torch.inf).softmax(-1))


@correct(46, 2, statistics="none", step="weights", base=Masked)
def rows_of_padding_switched_off(self, scores, shown):
    """Queries that are padding get no weights at all."""
    return scores.masked_fill(~shown, -torch.inf).softmax(-1) * shown.transpose(-2, -1)


@correct(57, 3, statistics="none", train=True, step="weigh", base=Divided)
def gated_weights(self, scores):
    """A gate of its own for every query and key, learned, on weights that were dropped."""
    gate = torch.sigmoid(scores.detach().mean(1, keepdim=True))
    return F.dropout(scores.softmax(-1), 0.1, self.training) * gate


@correct(44, 4, statistics="none", step="adjust", base=Divided)
def largest_five(self, scores):
    """Only the five largest scores of a row are kept."""
    fifth = scores.topk(5, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < fifth, -torch.inf)
