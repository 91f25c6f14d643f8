"""Axes of layers that are alike are found once, and those of layers that only look alike by themselves."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import nn

import attnscale
from attnscale.watching.written import alike
from attnscale.watching.written.axes import find_axes

HEADS, SIZE = 4, 6


class Attends(nn.Module):
    """Scores by `scores(query, key)`, softmax over the axis of their keys."""

    def __init__(self, scores=lambda query, key: query @ key.mT, axis=-1, shared=1):
        super().__init__()
        self.query, self.value = nn.Linear(24, 24), nn.Linear(24, 24)
        self.key = nn.Linear(24, 24 // shared)
        self.scores, self.axis, self.shared = scores, axis, shared

    def heads(self, x):
        return x.unflatten(-1, (-1, SIZE)).transpose(1, 2)

    def forward(self, x):
        query, key, value = (self.heads(part(x)) for part in (self.query, self.key, self.value))
        key = key if self.shared == 1 else key.repeat_interleave(self.shared, 1)
        weights = (self.scores(query, key) * SIZE**-0.5).softmax(self.axis)
        mixed = (weights if self.axis == -1 else weights.mT) @ value
        return x + mixed.transpose(1, 2).flatten(2)


def turned(query, key):
    return key @ query.mT


def interleaved(query, key):
    """Heads in another order, which is undone behind the product."""
    order = torch.tensor([0, 2, 1, 3])
    return (query[:, order] @ key[:, order].mT)[:, order]


KINDS = {
    "plain": Attends,
    "k @ q": lambda: Attends(turned, axis=-2),
    "shared keys": lambda: Attends(shared=2),
    "another order": lambda: Attends(interleaved),
    "scaled queries": lambda: Attends(lambda query, key: (query * 0.5) @ key.mT),
}


@pytest.fixture
def found(monkeypatch):
    """Every axes that a run finds, beside those that are found anew, and how many were looked for anew."""
    pairs, anew = [], []
    plain = alike.AlikeAxes.find

    def find(self, product, node, axis):
        axes = plain(self, product, node, axis)
        pairs.append((axes, find_axes(product, node, axis)))
        return axes

    def counted(product, node, axis):
        anew.append(node)
        return find_axes(product, node, axis)

    monkeypatch.setattr(alike.AlikeAxes, "find", find)
    monkeypatch.setattr(alike, "find_axes", counted)
    return pairs, anew


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_axes_are_those_that_would_be_found_anew(found, first, second, mode):
    torch.manual_seed(0)
    model = nn.Sequential(*(KINDS[kind]() for kind in (first, second, first, second)))
    with mode(), attnscale.watch(model) as seen:
        model(torch.randn(2, 9, 24))
    assert [layer.scale_applied for layer in seen.layers.values()] == pytest.approx(
        [SIZE**-0.5 * (0.5 if kind == "scaled queries" else 1.0) for kind in (first, second) * 2]
    )
    assert [layer.kv_heads for layer in seen.layers.values()] == [
        HEADS // 2 if kind == "shared keys" else HEADS for kind in (first, second) * 2
    ]
    assert len(found[0]) == 4
    for axes, anew in found[0]:
        assert axes.product is anew.product
        for each in fields(axes):
            if each.name != "node":
                np.testing.assert_array_equal(getattr(axes, each.name), getattr(anew, each.name), each.name)


def test_layers_that_are_alike_are_looked_at_once(found):
    model = nn.Sequential(*(Attends() for _ in range(5)))
    with torch.inference_mode(), attnscale.watch(model) as seen:
        model(torch.randn(1, 9, 24))
    assert len(seen.layers) == 5
    assert len(found[1]) == 1


def test_lengths_that_change_are_looked_at_each(found):
    model = Attends()
    with torch.inference_mode(), attnscale.watch(model):
        for length in (9, 12, 9):
            model(torch.randn(1, length, 24))
    assert len(found[1]) == 2
