"""Small models in training with QKClip, and the same loop with watch() and clip_qk_ written out."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnscale
from attnscale import QKClip

from ..acting.models import Attention, KeysAreValues, Normed, SharedQueriesAndKeys
from ..zoo.structures import CompressedKeys

D_MODEL, HEADS, LENGTH, RATE, GROWTH = 44, 4, 13, 0.05, 4.0


class GainFromOne(Normed):
    """Gains that are kept as 1 + weight, as Gemma keeps them."""

    def __init__(self, d_model, heads, kv_heads=None):
        super().__init__(d_model, heads, kv_heads)
        self.q_gain = nn.Parameter(torch.linspace(-0.3, 0.4, self.head_dim))

    def make(self, x):
        query, key = Attention.make(self, x)
        return F.rms_norm(query, query.shape[-1:]) * (1.0 + self.q_gain), key


class LatentKeys(CompressedKeys):
    """DeepSeek's latent attention through the fused kernel; the turned key is shared by all heads."""

    value_dim = CompressedKeys.plain + CompressedKeys.rotated  # others take no fused kernel on a CPU

    def __init__(self, d_model, heads, kv_heads=None):
        super().__init__(d_model, heads)

    def forward(self, x):
        query, key, value = self.project(x)
        return F.scaled_dot_product_attention(*self.prepare(query, key), value, is_causal=True)


class WrittenOut(Attention):
    """No fused kernel."""

    def forward(self, x):
        query, key = self.make(x)
        key, value = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (key, self.value(x)))
        return self.scores(query, key).softmax(-1) @ value

    def scores(self, query, key):
        return query @ key.mT * self.head_dim**-0.5


class Capped(WrittenOut):
    """A soft-cap, and what comes later is hidden by what is added."""

    def scores(self, query, key):
        later = torch.ones(query.shape[-2], key.shape[-2]).triu(1) * torch.finfo(query.dtype).min
        return 30.0 * torch.tanh(super().scores(query, key) / 30.0) + later


class Biased(WrittenOut):
    """Something is added to the scores of near keys, which can only be seen by following it."""

    def scores(self, query, key):
        return super().scores(query, key) + 0.5 * torch.eye(query.shape[-2])


class Layers(nn.Module):
    """Blocks one after the other, each run again in the backward pass where `again` says how."""

    def __init__(self, kind, kv_heads=None, again=None, tied=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind, kv_heads) for _ in range(2))
        self.again = again
        if tied:
            first, second = (block.attention for block in self.blocks)
            second.q_proj, second.k_proj = first.q_proj, first.k_proj

    def forward(self, x):
        x = x.requires_grad_(self.again == "reentrant")  # it would not go backward
        for block in self.blocks:
            x = block(x) if self.again is None else checkpoint(block, x, use_reentrant=self.again == "reentrant")
        return x


class Block(nn.Module):
    """An attention and what its output is projected by."""

    def __init__(self, kind, kv_heads):
        super().__init__()
        self.attention = kind(D_MODEL, HEADS, kv_heads)
        self.output = nn.LazyLinear(D_MODEL)

    def forward(self, x):
        return x + self.output(self.attention(x).transpose(1, 2).flatten(2))


MODELS = {
    "plain": {"kind": Attention},
    "grouped keys": {"kind": Attention, "kv_heads": 2},
    "one key": {"kind": Attention, "kv_heads": 1},
    "latent keys": {"kind": LatentKeys},
    "gains": {"kind": Normed},
    "gains kept as 1 + weight": {"kind": GainFromOne},
    "tied": {"kind": Attention, "tied": True},
    "queries are keys": {"kind": SharedQueriesAndKeys},
    "keys are values": {"kind": KeysAreValues},
    "written out": {"kind": WrittenOut},
    "written out, grouped keys": {"kind": WrittenOut, "kv_heads": 2},
    "written out, capped": {"kind": Capped},
    "written out, checkpoints": {"kind": WrittenOut, "again": "not reentrant"},
    "reentrant checkpoints": {"kind": Attention, "again": "reentrant"},
    "checkpoints": {"kind": Attention, "again": "not reentrant"},
}


def made(kind=Attention, **settings):
    """A model of which the first head of the first layer, and those it shares with, run ahead."""
    torch.manual_seed(7)
    model = Layers(kind, **settings)
    model(data(0))  # what is lazy takes its shape
    attention = model.blocks[0].attention
    sharp = attention.q_proj.weight
    with torch.no_grad():
        sharp[: len(sharp) // HEADS].mul_(4.0)
        if isinstance(attention, GainFromOne):
            attention.q_gain.mul_(3.0)
    return model


def data(step, part=0):
    """A micro-batch of a step."""
    generator = torch.Generator().manual_seed(100 * part + step)
    return torch.randn(2, LENGTH, D_MODEL, generator=generator)


def highest(model, steps=3, parts=1):
    """The largest score of each head at each of the first steps, if it stayed as it is."""
    model = copy.deepcopy(model)
    with attnscale.watch(model, rows=None) as seen:
        for step in range(steps):
            for part in range(parts):
                model(data(step, part))
    return torch.cat([layer.stats.max for layer in seen.layers.values()])


def growing(model):
    """SGD under which every parameter grows, so that scores pass any threshold again and again."""
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    optimizer.param_groups[0]["weight_decay"] = -GROWTH
    return optimizer


def trained(model, run, steps, micro=1, optimizer=None, after=lambda: None):
    optimizer = growing(model) if optimizer is None else optimizer
    for step in range(steps):
        for part in range(micro):
            run(data(step, part)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def with_clip(model, threshold, steps=4, compiled=lambda model: model, **training):
    """The QKClip of a model in training, and its reports."""
    run, reports, clip = compiled(model), [], QKClip(model, threshold)
    trained(model, run, steps, after=lambda: reports.append(clip.step()), **training)
    clip.flush()
    return clip, reports


def by_hand(model, threshold, steps=4, micro=1):
    """The reports of clip_qk_ after each step, by what watch() saw of its forwards."""
    optimizer, reports = growing(model), []
    for step in range(steps):
        with attnscale.watch(model, rows=None) as seen:
            losses = [model(data(step, part)).square().mean() for part in range(micro)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reports.append(attnscale.clip_qk_(model, seen, threshold))
    return reports
