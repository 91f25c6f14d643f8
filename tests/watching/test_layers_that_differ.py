"""Layers of one model that compute their scores in different ways are each read by themselves."""

import pytest
import torch
from torch import nn

import attnscale

HEADS, SIZE, WIDTH = 4, 6, 24


class Attends(nn.Module):
    """Scores by `scores(query, key)`, softmax over the axis of their keys."""

    def __init__(self, scores=lambda query, key: query @ key.mT, axis=-1, shared=1):
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH // shared)
        self.scores, self.axis, self.shared = scores, axis, shared

    def heads(self, x):
        return x.unflatten(-1, (-1, SIZE)).transpose(1, 2)

    def forward(self, x):
        query, key, value = (self.heads(part(x)) for part in (self.query, self.key, self.value))
        key = key if self.shared == 1 else key.repeat_interleave(self.shared, 1)
        weights = (self.scores(query, key) * SIZE**-0.5).softmax(self.axis)
        mixed = (weights if self.axis == -1 else weights.mT) @ value
        return x + mixed.transpose(1, 2).flatten(2)


def transposed(query, key):
    return key @ query.mT


def reordered(query, key):
    """Heads in another order, which is undone behind the product."""
    order = torch.tensor([0, 2, 1, 3])
    return (query[:, order] @ key[:, order].mT)[:, order]


def halved(query, key):
    return (query * 0.5) @ key.mT


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_each_layer_has_its_own_scale_and_key_heads(mode):
    torch.manual_seed(0)
    layers = Attends(), Attends(transposed, axis=-2), Attends(shared=2), Attends(reordered), Attends(halved), Attends()
    model = nn.Sequential(*layers)
    with mode(), attnscale.watch(model) as seen:
        model(torch.randn(2, 9, WIDTH))
    scales = [layer.scale_applied * SIZE**0.5 for layer in seen.layers.values()]
    assert scales == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.5, 1.0])
    assert [layer.kv_heads for layer in seen.layers.values()] == [HEADS, HEADS, HEADS // 2, HEADS, HEADS, HEADS]
