"""A known model is told of by the few modules that matter; the others are called as if nobody looked."""

import copy
import io

import pytest
import torch
from torch.nn.modules import module as torch_module

from attnscale.models import CausalTransformer
from attnscale.watching.settings import Settings
from attnscale.watching.watch import watched

LAYERS = 3


@pytest.fixture
def model():
    torch.manual_seed(0)
    return CausalTransformer(vocabulary=17, d_model=66, layers=LAYERS, heads=3)


@pytest.fixture
def tokens():
    return torch.arange(26).reshape(2, 13) % 17


def known_by(model, tokens):
    with watched(model, Settings(rows=None, training=True)) as seen:
        model(tokens).square().mean().backward()
    assert seen.known_model is not None
    return Settings(rows=None, training=True, known=seen.known_model)


def hooks_on(model):
    return {name for name, each in model.named_modules() if each._forward_hooks or each._forward_pre_hooks}


def global_hooks():
    return len(torch_module._global_forward_hooks) + len(torch_module._global_forward_pre_hooks)


def test_only_the_outermost_module_and_those_that_attend_have_hooks(model, tokens):
    """And a list of modules, which never ran, and would be followed if it did."""
    settings, before = known_by(model, tokens), global_hooks()
    with watched(model, settings) as seen:
        assert global_hooks() == before
        assert hooks_on(model) == {"", "blocks", *(f"blocks.{layer}.attention" for layer in range(LAYERS))}
        model(tokens).square().mean().backward()
    assert not hooks_on(model)
    assert len(seen.layers) == LAYERS
    assert all(layer.query_gradient is not None for layer in seen.layers.values())


@pytest.mark.parametrize("saved", [False, True])
def test_a_copy_made_meanwhile_tells_nobody(model, tokens, saved):
    settings = known_by(model, tokens)
    with watched(model, settings) as seen:
        if saved:
            torch.save(model, file := io.BytesIO())
            file.seek(0)
            other = torch.load(file, weights_only=False)
        else:
            other = copy.deepcopy(model)
        other(tokens)
        output = model(tokens)
        output.square().mean().backward()
    assert [layer.calls for layer in seen.layers.values()] == [1] * LAYERS
    torch.testing.assert_close(other(tokens), output, rtol=0, atol=0)


def test_a_module_that_is_replaced_before_the_forward_is_followed(model, tokens):
    """What is known of the one before must not be told of it: a constant may be another."""
    other = copy.deepcopy(model.blocks[1])
    other.attention.scale = 3.0
    settings = known_by(model, tokens)
    with watched(model, settings) as seen:
        model.blocks[1] = other
        model(tokens).square().mean().backward()
    assert not hooks_on(model)
    assert seen.layers["blocks.1.attention"].scale_applied == pytest.approx(3.0)
    assert len(seen.layers) == LAYERS
    assert seen.known_model is None
