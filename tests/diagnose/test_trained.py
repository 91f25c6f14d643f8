import pytest
import torch
from torch import nn

from attnscale.diagnose import is_trained


def encoder():
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


def without_norms(bias=True):
    return nn.Sequential(nn.Linear(16, 64, bias=bias), nn.ReLU(), nn.Linear(64, 16, bias=bias))


def zero_biases():
    model = without_norms()
    for module in (model[0], model[2]):
        nn.init.xavier_normal_(module.weight)
        nn.init.zeros_(module.bias)
    return model


def zero_gains():
    model = encoder()
    nn.init.zeros_(model.norm1.weight)
    return model


@pytest.mark.parametrize("make", [encoder, without_norms])
def test_a_model_is_at_initialisation_until_it_takes_a_step(make):
    model = make()
    assert not is_trained(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(20):
        model(torch.randn(3, 5, 16)).square().mean().backward()
        optimiser.step()
    assert is_trained(model)


@pytest.mark.parametrize(
    "make",
    [
        zero_biases,
        zero_gains,
        lambda: without_norms(bias=False),  # nothing shows training
        lambda: nn.Sequential(nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, 16, bias=False)),
        lambda: without_norms().to(torch.bfloat16),
        lambda: without_norms().to(torch.float16),
    ],
)
def test_these_count_as_initialisations(make):
    assert not is_trained(make())
