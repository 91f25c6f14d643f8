"""Predictions against a layer that is drawn and measured."""

import math

import pytest
import torch
from torch import nn

from attnscale.errors import SettingError
from attnscale.theory import expected_softmax, predict


def measured_spread(query_weight, key_weight, heads, query_bias=None, key_bias=None):
    """Standard deviation of q·k over pairs of different tokens, averaged over heads."""
    tokens, d_model = 600, query_weight.shape[1]
    x = torch.randn(tokens, d_model)
    q = nn.functional.linear(x, query_weight, query_bias).unflatten(-1, (heads, -1)).transpose(0, 1)
    k = nn.functional.linear(x, key_weight, key_bias).unflatten(-1, (heads, -1)).transpose(0, 1)
    scores = q @ k.mT
    scores = scores[:, ~torch.eye(tokens, dtype=torch.bool)]  # a token's score with itself is not independent
    return scores.var(-1).mean().sqrt().item()


def test_gpt2_at_initialisation():
    d_model, heads = 768, 12
    q, k = (nn.init.normal_(torch.empty(d_model, d_model), std=0.02) for _ in range(2))
    prediction = predict(d_model, heads, 1024, initialisation="normal:0.02")
    assert prediction.score_std == pytest.approx(8 * 0.3072)
    assert prediction["inverse_sqrt"].spread == pytest.approx(0.3072)
    assert measured_spread(q, k, heads) == pytest.approx(prediction.score_std, rel=0.03)


def test_torch_multihead_attention_starts_at_half_the_spread_since_its_matrix_is_packed():
    layer = nn.MultiheadAttention(512, 8)
    q, k, _ = layer.in_proj_weight.detach().chunk(3)
    prediction = predict(512, 8, 128, initialisation="xavier", packed=True)
    assert prediction["inverse_sqrt"].spread == pytest.approx(0.5)
    assert measured_spread(q, k, 8) == pytest.approx(prediction.score_std, rel=0.03)


def test_torch_linear_with_its_bias():
    q, k = nn.Linear(512, 512), nn.Linear(512, 512)
    prediction = predict(512, 8, 128, initialisation="torch")
    measured = measured_spread(q.weight.detach(), k.weight.detach(), 8, q.bias.detach(), k.bias.detach())
    assert measured == pytest.approx(prediction.score_std, rel=0.03)


def test_the_calibrated_scale_gives_unit_spread_whatever_the_initialisation():
    for init in ("xavier", "kaiming", "normal:0.02", "orthogonal", "torch", "lecun:3"):
        prediction = predict(768, 12, 1024, initialisation=init, input_variance=0.7)
        assert prediction["calibrated"].spread == pytest.approx(1.0)
        assert prediction["calibrated"].scale == pytest.approx(1 / prediction.score_std)


def test_expectations_are_those_of_the_spread():
    candidate = predict(768, 12, 1024, initialisation="xavier")["unscaled"]
    assert candidate.spread == pytest.approx(8.0)
    assert candidate.softmax.jacobian_trace == pytest.approx(expected_softmax(8.0, 1024).jacobian_trace)


def test_advice_names_the_constant_that_would_be_right():
    assert "one, as intended" in predict(768, 12, 1024).advice
    assert "over so few keys is near the critical spread" in predict(768, 12, 2).advice
    assert "not the right constant" not in predict(768, 12, 2).advice
    assert "0.407" in predict(768, 12, 1024, initialisation="normal:0.02").advice
    sharp = predict(768, 12, 1024, initialisation="normal:0.2").advice
    assert sharp.startswith("1/√d_k is not the right constant")
    assert "too sharp" in sharp
    assert "nearly uniform" in predict(768, 12, 1024, initialisation="normal:0.002").advice


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"heads": 7}, "heads that divide d_model"),
        ({"heads": 0}, "heads that divide d_model"),
        ({"length": 1}, "length of at least 2"),
        ({"head_dim": 0}, "head_dim of at least 1"),
        ({"input_variance": math.nan}, "input variance"),
    ],
)
def test_bad_settings_are_refused(settings, sentence):
    with pytest.raises(SettingError, match=sentence):
        predict(**{"d_model": 768, "heads": 12, "length": 16, **settings})
