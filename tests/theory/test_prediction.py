"""Predictions of initialisations and layers against weights that torch draws."""

import math

import pytest
import torch
from torch import nn

from attnscale.errors import SettingError
from attnscale.theory import Initialisation, expected_softmax, predict

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
    linear, init = nn.Linear(512, 4096), Initialisation.parse("torch")
    assert linear.weight.var().item() == pytest.approx(init.weight_variance(512, 4096), rel=0.01)
    assert linear.bias.var().item() == pytest.approx(init.bias_variance(512), rel=0.06)


@pytest.mark.parametrize("text", ["gaussian", "normal", "normal:", "normal:x", "xavier:-1", "xavier:nan", ""])
def test_a_bad_initialisation_is_refused_with_what_to_write(text):
    with pytest.raises(SettingError, match=r"normal:0.02|positive number"):
        Initialisation.parse(text)


def linear(weight):
    layer = nn.Linear(*weight.T.shape, bias=False)
    layer.weight = nn.Parameter(weight)
    return layer


LAYERS = {  # projections of queries and keys
    "GPT-2": lambda: [linear(nn.init.normal_(torch.empty(768, 768), std=0.02)) for _ in range(2)],
    "packed": lambda: [linear(part) for part in nn.MultiheadAttention(512, 8).in_proj_weight.chunk(3)[:2]],
    "with bias": lambda: [nn.Linear(512, 512), nn.Linear(512, 512)],
}


@pytest.mark.parametrize(
    ("layer", "heads", "settings", "spread"),
    [
        ("GPT-2", 12, {"initialisation": "normal:0.02"}, 0.3072),
        ("packed", 8, {"initialisation": "xavier", "packed": True}, 0.5),
        ("with bias", 8, {"initialisation": "torch"}, None),
    ],
)
def test_the_spread_of_a_fresh_layer_is_the_predicted_one(layer, heads, settings, spread):
    query, key = LAYERS[layer]()
    d_model, tokens = query.in_features, 600
    with torch.no_grad():
        x = torch.randn(tokens, d_model)
        q, k = (project(x).unflatten(-1, (heads, -1)).transpose(0, 1) for project in (query, key))
    scores = (q @ k.mT)[:, ~torch.eye(tokens, dtype=torch.bool)]  # a token's score with itself is not independent
    prediction = predict(d_model, heads, 128, **settings)
    assert scores.var(-1).mean().sqrt().item() == pytest.approx(prediction.score_std, rel=0.03)
    if spread is not None:
        assert prediction["inverse_sqrt"].spread == pytest.approx(spread)


def test_the_calibrated_scale_gives_unit_spread_at_any_initialisation():
    unscaled = predict(768, 12, 1024, initialisation="xavier")["unscaled"]
    assert unscaled.spread == pytest.approx(8.0)
    assert unscaled.softmax == expected_softmax(unscaled.spread, 1024)
    for init in ("xavier", "kaiming", "normal:0.02", "orthogonal", "torch", "lecun:3"):
        prediction = predict(768, 12, 1024, initialisation=init, input_variance=0.7)
        assert prediction["calibrated"].spread == pytest.approx(1.0)
        assert prediction["calibrated"].scale == pytest.approx(1 / prediction.score_std)


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
