"""Models of one attention, both ways to clip them, and what was changed in them."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

import attnscale

D_MODEL, HEADS, HEAD_DIM, LENGTH, BATCH = 55, 5, 11, 13, 2


def made(kind=None, factor=1.0, **settings):
    """A model of which the queries of the first head are multiplied."""
    torch.manual_seed(5)
    return sharpened((kind or Attention)(D_MODEL, HEADS, **settings), "q_proj.weight", slice(HEAD_DIM), factor)


def batch(dtype=torch.float32):
    return (torch.randn(BATCH, LENGTH, D_MODEL, generator=torch.Generator().manual_seed(3)).to(dtype),)


def sharpened(model, name, rows, factor):
    """A copy of the model with some rows of a parameter multiplied."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.get_parameter(name)[rows] *= factor
    return model


def watched(model, inputs, rows=None):
    with torch.no_grad(), attnscale.watch(model, rows=rows) as seen:
        model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return seen


def maxima(model, inputs):
    """The largest score of each head of each layer."""
    return torch.cat([layer.stats.max for layer in watched(model, inputs).layers.values()])


def with_clip_qk(model, inputs, threshold, steps, after=lambda step: None):
    for step in range(steps):
        yield attnscale.clip_qk_(model, watched(model, inputs), threshold)
        after(step)


def with_qk_clip(model, inputs, threshold, steps, after=lambda step: None):
    with attnscale.QKClip(model, threshold) as clip:
        for step in range(steps):
            model(*inputs).square().mean().backward()
            yield clip.step()
            after(step)


WAYS = {"clip_qk_": with_clip_qk, "QKClip": with_qk_clip}


def between(largest):
    """A threshold that the highest head passes and the second does not."""
    ordered = largest.sort().values
    return float(ordered[-1]) / 2 if len(ordered) == 1 else float(ordered[-2:].mean())


def before_and(model):
    """The parameters as they are."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def touched(report):
    return [each for head in report.heads for each in head.touched]


def parameters(report):
    return {each.parameter for each in touched(report)}


def assert_changed_as_told(before, model, touched):
    """Every touched row is what its factor makes of it, and every other element is as it was, to the last bit."""
    told = {name: values.clone() for name, values in before.items()}
    for name, rows, across, offset, factor in {
        (each.parameter, each.rows, each.across, each.offset, each.factor) for each in touched
    }:
        values = told[name]
        kept = [axis for axis in range(values.dim()) if axis not in across]
        by_row = values.permute(*kept, *across)
        flat = by_row.reshape(math.prod(by_row.shape[: len(kept)]), -1)
        at = torch.tensor(rows)
        assert torch.equal(flat[at], before[name].permute(*kept, *across).reshape(flat.shape)[at]), "changed twice"
        flat[at] = ((flat[at].double() + offset) * factor - offset).to(values.dtype)
        order = [[*kept, *across].index(axis) for axis in range(values.dim())]
        told[name] = flat.clone().reshape(by_row.shape).permute(order).contiguous()
    for name, parameter in model.named_parameters():
        untouched = told[name] == before[name]
        assert torch.equal(parameter[untouched], before[name][untouched]), name
        torch.testing.assert_close(parameter.detach(), told[name])


class Attention(nn.Module):
    """One attention whose queries and keys are made by `make(x)`: (batch, heads, length, head_dim) each."""

    def __init__(self, d_model, heads, kv_heads=None):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads or heads, d_model // heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, self.kv_heads * self.head_dim)
        self.v_proj = nn.Linear(d_model, self.kv_heads * self.head_dim)

    def split(self, x, heads):
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    def make(self, x):
        return self.split(self.q_proj(x), self.heads), self.split(self.k_proj(x), self.kv_heads)

    def value(self, x):
        return self.split(self.v_proj(x), self.kv_heads)

    def forward(self, x):
        query, key = self.make(x)
        return F.scaled_dot_product_attention(query, key, self.value(x), enable_gqa=True)


class SharedQueriesAndKeys(Attention):
    """Reformer's: one projection for both."""

    def make(self, x):
        both = self.split(self.q_proj(x), self.heads)
        return both, both


class KeysAreValues(Attention):
    def value(self, x):
        return self.split(self.k_proj(x), self.kv_heads)


class Normed(Attention):
    def __init__(self, d_model, heads, kv_heads=None):
        super().__init__(d_model, heads, kv_heads)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)

    def make(self, x):
        query, key = super().make(x)
        return self.q_norm(query), self.k_norm(key)
