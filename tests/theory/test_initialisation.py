"""Predicted variances against weights drawn by torch.nn.init itself."""

import math

import pytest
import torch
from torch import nn

from attnscale.errors import SettingError
from attnscale.theory import Initialisation

DRAW = {
    "xavier": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "xavier:0.5": lambda w: nn.init.xavier_uniform_(w, gain=0.5),
    "kaiming": nn.init.kaiming_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "normal:0.02": lambda w: nn.init.normal_(w, std=0.02),
    "orthogonal": nn.init.orthogonal_,
    "orthogonal:2": lambda w: nn.init.orthogonal_(w, gain=2.0),
}


@pytest.mark.parametrize("fan_out", [96, 384, 1152])
@pytest.mark.parametrize("name", DRAW)
def test_projected_variance_matches_torch_init(name, fan_out):
    fan_in, tokens, input_variance = 384, 2000, 1.7
    weight = DRAW[name](torch.empty(fan_out, fan_in))
    projected = torch.randn(tokens, fan_in) * math.sqrt(input_variance) @ weight.T
    expected = Initialisation.parse(name).projected_variance(fan_in, fan_out, input_variance)
    assert projected.var().item() == pytest.approx(expected, rel=0.03)


def test_torch_linear_weights_and_bias_match_its_default():
    linear = nn.Linear(512, 4096)
    init = Initialisation.parse("torch")
    assert linear.weight.var().item() == pytest.approx(init.weight_variance(512, 4096), rel=0.01)
    assert linear.bias.var().item() == pytest.approx(init.bias_variance(512), rel=0.06)


def test_gpt2_starts_with_a_variance_of_a_third():
    assert Initialisation.parse("normal:0.02").projected_variance(768, 768) == pytest.approx(0.3072)


@pytest.mark.parametrize("text", ["gaussian", "normal", "normal:", "normal:x", "xavier:-1", "xavier:nan", ""])
def test_a_bad_initialisation_is_refused_with_what_to_write(text):
    with pytest.raises(SettingError, match=r"normal:0.02|positive number"):
        Initialisation.parse(text)
