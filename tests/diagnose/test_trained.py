import pytest
import torch
from torch import nn

from attnscale.diagnose import is_trained


def step(model, width=16):
    """One optimiser step on nothing in particular."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(3, 5, width)).square().mean().backward()
    optimiser.step()
    return model


def encoder():
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


def without_norms(bias=True):
    return nn.Sequential(nn.Linear(16, 64, bias=bias), nn.ReLU(), nn.Linear(64, 16, bias=bias))


@pytest.mark.parametrize("make", [encoder, without_norms], ids=["norms", "no norms"])
def test_a_model_is_at_initialisation_until_it_takes_a_step(make):
    model = make()
    assert not is_trained(model)
    for _ in range(20):
        step(model)
    assert is_trained(model)


def test_zero_biases_are_an_initialisation():
    model = without_norms()
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            nn.init.zeros_(module.bias)
    assert not is_trained(model)


def test_gains_that_start_at_zero_are_an_initialisation():
    model = encoder()
    nn.init.zeros_(model.norm1.weight)
    assert not is_trained(model)


def test_what_says_nothing_is_taken_to_be_at_initialisation():
    assert not is_trained(without_norms(bias=False))
    assert not is_trained(nn.Sequential(nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, 16, bias=False)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_not_training(dtype):
    assert not is_trained(without_norms().to(dtype))
