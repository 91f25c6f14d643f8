"""Which calls are one layer: told by the module and the line of its own code, never by who called it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnscale
from tests.zoo.entry import SelfAttention


@pytest.mark.parametrize("train", [False, True])
def test_a_layer_of_torchs_own_is_one_though_its_model_is_called_on_two_lines(train):
    model = nn.TransformerEncoderLayer(24, 2, batch_first=True).train(train)
    with attnscale.watch(model) as seen, torch.no_grad():
        model(torch.randn(1, 5, 24))
        model(torch.randn(1, 7, 24))
    assert {name: layer.calls for name, layer in seen.layers.items()} == {"self_attn": 2}


def test_a_layer_of_torchs_own_is_one_though_its_parent_calls_it_on_two_lines():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(24, 2, batch_first=True)

        def forward(self, x):
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return x + self.attention(x, x, x, need_weights=False)[0]

    with attnscale.watch(model := Twice()) as seen:
        model(torch.randn(1, 5, 24))
    assert {name: layer.calls for name, layer in seen.layers.items()} == {"attention": 2}


def test_two_attentions_of_one_module_are_two_though_one_module_is_the_softmax_of_both():
    class Two(SelfAttention):
        def __init__(self):
            super().__init__(24, 2)
            self.softmax = nn.Softmax(dim=-1)

        def forward(self, x):
            query, key, value = self.project(x)
            first = self.softmax(query @ key.mT / 12**0.5) @ value
            second = self.softmax(key @ query.mT / 12**0.5) @ value
            return self.merge(first + second)

    model = Two()
    with attnscale.watch(model) as seen:
        for _ in range(2):
            model(torch.randn(1, 5, 24))
    assert {name: layer.calls for name, layer in seen.layers.items()} == {"Two": 2, "Two#2": 2}


def test_a_table_shown_before_the_backward_pass_does_not_keep_its_gradients_from_being_seen():
    class Sdpa(SelfAttention):
        def forward(self, x):
            return self.merge(F.scaled_dot_product_attention(*self.project(x)))

    model = Sdpa(33, 3)
    with attnscale.watch(model) as seen:
        loss = model(torch.randn(2, 7, 33)).square().sum()
        assert "Sdpa" in str(seen)
        layer = seen.layers["Sdpa"]
        assert layer.query_gradient is None
        loss.backward()
    for found in (layer, seen.layers["Sdpa"]):
        assert bool((found.query_gradient > 0).all())
        assert bool((found.key_gradient > 0).all())


@pytest.mark.parametrize("keep", [False, True])
def test_the_dtype_of_a_layer_is_known_whether_its_queries_are_kept_or_not(keep):
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.MultiheadAttention(24, 2, batch_first=True, dtype=dtype)
        x = torch.randn(1, 5, 24, dtype=dtype)
        with attnscale.watch(model, keep=keep) as seen:
            model(x, x, x)
        (layer,) = seen.layers.values()
        assert layer.dtype is dtype
        assert (layer.query is not None) is keep
