"""Designs whose softmax runs over another axis than the keys, or between channels; all of them are right.

What cannot be read of them may be said in a note; none gets a warning or an error.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .bases import Divided, SelfAttention
from .entry import UNREAD, correct


class Slots(nn.Module):
    """Slot attention: slots compete for inputs, softmax over slots, then each slot averages what it won."""

    def __init__(self, d_model, *args, **kwargs):
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 5, d_model))
        self.to_q, self.to_k, self.to_v = (nn.Linear(d_model, d_model, bias=False) for _ in range(3))
        self.cell, self.norm = nn.GRUCell(d_model, d_model), nn.LayerNorm(d_model)
        self.back = nn.Linear(d_model, d_model)

    def forward(self, x):
        key, value = self.to_k(x), self.to_v(x)
        slots = self.start.expand(x.shape[0], -1, -1)
        for _ in range(3):
            query = self.to_q(self.norm(slots))
            update = self.updates(query, key, value)
            slots = self.cell(update.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        return self.back(slots.mean(1, keepdim=True).expand_as(x))


@correct(33, 1, **UNREAD, step="updates", base=Slots)
def slots_over_queries(self, query, key, value):
    """einsum, dim=1 of (batch, slots, inputs)."""
    dots = torch.einsum("bid,bjd->bij", query, key) * query.shape[-1] ** -0.5
    weights = dots.softmax(dim=1) + 1e-8
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return torch.einsum("bjd,bij->bid", value, weights)


@correct(39, 1, **UNREAD, step="updates", base=Slots)
def slots_last(self, query, key, value):
    """Inputs first: softmax over the last axis, which is the slots'; normalised over the first."""
    logits = key @ query.transpose(1, 2) * query.shape[-1] ** -0.5
    weights = F.softmax(logits, dim=-1) + 1e-8
    weights = weights / torch.sum(weights, dim=1, keepdim=True)
    return weights.transpose(1, 2) @ value


@correct(51, 1, **UNREAD, step="updates", base=Slots)
def slots_mixed_then_divided(self, query, key, value):
    """The average taken after the sum."""
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-2)
    return (weights @ value) / weights.sum(-1, keepdim=True)


@correct(66, 3, **UNREAD)
class GroupAssignment(SelfAttention):
    """GroupViT's: every token is assigned to groups, the queries; a group averages its tokens."""

    def add_parts(self):
        self.groups = nn.Parameter(torch.randn(1, 4, self.heads * self.head_dim))

    def forward(self, x):
        query = self.split(self.q_proj(self.groups.expand(x.shape[0], -1, -1)))
        key, value = self.split(self.k_proj(x)), self.split(self.v_proj(x))
        scores = (query @ key.transpose(-2, -1)) * self.head_dim**-0.5
        soft = F.softmax(scores, dim=-2)
        index = soft.max(-2, keepdim=True)[1]
        hard = torch.zeros_like(soft).scatter_(-2, index, 1.0)
        weights = hard - soft.detach() + soft
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1.0)
        return self.merge(weights @ value).mean(1, keepdim=True).expand_as(x)


@correct(78, 3, **UNREAD)
class CrossCovariance(SelfAttention):
    """XCiT's: channels attend to channels, both of unit length over the tokens, with a learned temperature."""

    def add_parts(self):
        self.temperature = nn.Parameter(torch.ones(self.heads, 1, 1))

    def attend(self, *heads):
        query, key, value = (y.transpose(-2, -1) for y in heads)
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        weights = ((query @ key.transpose(-2, -1)) * self.temperature).softmax(dim=-1)
        return (weights @ value).transpose(-2, -1)


@correct(44, 2, **UNREAD)
class TransposedAttention(nn.Module):
    """Restormer's, over the pixels of an image, from convolutions."""

    def __init__(self, d_model, heads, head_dim=None, kv_heads=None):
        super().__init__()
        self.heads = heads
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.qkv, self.out = nn.Conv1d(d_model, 3 * d_model, 1), nn.Conv1d(d_model, d_model, 1)

    def forward(self, x):
        query, key, value = (y.unflatten(1, (self.heads, -1)) for y in self.qkv(x.transpose(1, 2)).chunk(3, dim=1))
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        weights = (query @ key.mT * self.temperature).softmax(-1)
        return self.out((weights @ value).flatten(1, 2)).transpose(1, 2)


@correct(60, 4, statistics="none", calls=None, scale=None, seen_heads=None, seen_dim=None, step="weigh", base=Divided)
def sinkhorn(self, scores):
    """Rows and columns normalised in turns, the rows last."""
    weights = torch.exp(scores)
    for _ in range(3):
        weights = weights / weights.sum(-2, keepdim=True)
        weights = weights / weights.sum(-1, keepdim=True)
    return weights
