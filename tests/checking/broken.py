"""Models to check, each wrong in its own way: written to a folder, and named as broken:<name>."""

import math
import warnings

import torch
from torch import nn

from attnscale.errors import NotFollowedWarning

D_MODEL, HEADS, LENGTH = 44, 2, 23
EVIL = "</script><img src=x onerror=alert(1)>"


class Attention(nn.Module):
    def __init__(self, divisor):
        super().__init__()
        self.divisor = divisor
        self.query, self.key, self.value = (nn.Linear(D_MODEL, D_MODEL, bias=False) for _ in range(3))
        for projection in (self.query, self.key):
            nn.init.normal_(projection.weight, std=D_MODEL**-0.5)

    def forward(self, x):
        query, key, value = (
            projection(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-2, -1) / self.divisor
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class Stack(nn.Module):
    def __init__(self, *divisors):
        super().__init__()
        self.layers = nn.ModuleList(Attention(divisor) for divisor in divisors)
        self.norm = nn.LayerNorm(D_MODEL)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return x


class Named(Stack):
    """One layer of a name that is none."""

    def __init__(self, name, divisor):
        super().__init__()
        self.odd = name
        self.add_module(name, Attention(divisor))

    def forward(self, x):
        return getattr(self, self.odd)(self.norm(x))


class Plain(nn.Module):
    def forward(self, x):
        return x.relu()


def x():
    return torch.randn(3, LENGTH, D_MODEL)


GOOD = math.sqrt(D_MODEL / HEADS)


def past_critical_spread():
    """Projections of twice the size: a spread of some 4 over 23 keys, past the critical 2.5; gradients pass."""
    torch.manual_seed(0)
    model = Stack(GOOD)
    with torch.no_grad():
        for projection in (model.layers[0].query, model.layers[0].key):
            projection.weight *= 1.75
    return model, x()


def healthy():
    return Stack(GOOD, GOOD), x()


def unscaled():
    return Stack(1.0, GOOD, 1.0), x()


def evil():
    return Named(EVIL, 1.0), x()


def coloured():
    return Named("\x1b[31mred[bold]", 1.0), x()


def not_a_number():
    model = Stack(GOOD, GOOD)
    model.layers[0].query.weight.data[0, 0] = math.nan
    return model, x()


def without_attention():
    return Plain(), x()


def fails():
    return Stack(GOOD), torch.randn(3, LENGTH, D_MODEL + 1)


def too_large():
    class Huge(nn.Module):
        def forward(self, x):
            return torch.empty(2**60)

    return Huge(), x()


def warns():
    class Warns(Stack):
        def forward(self, x):
            warnings.warn("A thing that could not be followed is the model's own affair.", stacklevel=1)
            warnings.warn("Two modules\n were left out", NotFollowedWarning, stacklevel=1)
            return super().forward(x)

    return Warns(GOOD), x()


class LinearAttention(nn.Module):
    """Attention without a softmax: none that can be read."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(D_MODEL, D_MODEL) for _ in range(3))

    def forward(self, x):
        query, key = (nn.functional.elu(projection(x)) + 1 for projection in (self.query, self.key))
        return query @ (key.mT @ self.value(x)) / (query @ key.sum(1, keepdim=True).mT)


def linear():
    return nn.Sequential(LinearAttention()), torch.randn(2, LENGTH, D_MODEL)
