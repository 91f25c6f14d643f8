import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from attnscale.lab.experiments import initialisation
from attnscale.lab.experiments.initialisation import HEADS, SCHEMES
from tests.lab.concluding import all_hold, concluded, made_up, quick, rerun, seen_to_be_wrong


def test_every_scheme_spreads_as_predicted_and_calibrates_to_one():
    assert all_hold(concluded("initialisation"))
    spread = {
        name: math.sqrt(quick("initialisation").band("variance", scheme=name, d_model=256).mean) for name in SCHEMES
    }
    expected = {"Xavier": 1, "Xavier packed": 0.5, "Kaiming": 2, "normal(0.02)": 0.1024, "orthogonal": 1, "muP": 1}
    assert {name: spread[name] for name in expected} == pytest.approx(expected, rel=0.02)
    assert spread["nn.Linear"] == pytest.approx(math.sqrt(1 / 9 + 2 / 9 / 256), rel=0.02)  # with its biases


def test_gpt2_starts_at_a_third_of_unit_spread():
    initialisation_of_gpt2 = SCHEMES["normal(0.02)"].predicted_variance(768)
    assert math.sqrt(initialisation_of_gpt2) == pytest.approx(0.307, abs=0.0005)


def test_schemes_draw_as_torch_does():
    torch.manual_seed(0)
    x = torch.randn(512, 256)
    linear, packed = nn.Linear(256, 256), nn.MultiheadAttention(256, HEADS)
    made = {"nn.Linear": linear(x), "Xavier packed": x @ packed.in_proj_weight[:256].T}
    for name, projected in made.items():
        query, _ = SCHEMES[name].project(x)
        assert query.std().item() == pytest.approx(projected.std().item(), rel=0.02)


def test_weights_a_tenth_too_large_are_seen(monkeypatch):
    larger = replace(SCHEMES["orthogonal"], draw=lambda weight: nn.init.orthogonal_(weight, gain=1.1))
    monkeypatch.setitem(initialisation.SCHEMES, "orthogonal", larger)
    conclusion = concluded("initialisation", rerun("initialisation", scheme="orthogonal"))
    assert seen_to_be_wrong(conclusion, "orthogonal: the scores' variance")
    assert seen_to_be_wrong(conclusion, "orthogonal: the calibrated scale")
    assert "spread of one for Xavier, and not for" in conclusion.text


def test_schemes_that_all_start_at_one_leave_none_over():
    text = concluded("initialisation", made_up("initialisation", lambda own, found: {"variance": 1.0})).text
    assert "and not for" not in text
    assert "muP" in text
