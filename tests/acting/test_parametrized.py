"""Weights that are made of other parameters are not written; what is left of the head takes the whole factor."""

import pytest
import torch
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as older_spectral_norm

import attnscale

from .models import Attention, before_and, watched

D_MODEL, HEADS, LENGTH = 55, 5, 13
pytestmark = pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated")
WRAPS = {
    "spectral norm": parametrizations.spectral_norm,
    "older spectral norm": older_spectral_norm,
    "weight norm": parametrizations.weight_norm,
}


def made(wrap, *sides):
    torch.manual_seed(5)
    model = Attention(D_MODEL, HEADS)
    for side in sides:
        wrap(getattr(model, f"{side}_proj"))
    return model.eval(), (torch.randn(2, LENGTH, D_MODEL),)


def largest(model, inputs):
    (layer,) = watched(model, inputs).layers.values()
    return float(layer.stats.max.max())


ACTIONS = {
    "clip_qk_": lambda model, inputs: attnscale.clip_qk_(model, watched(model, inputs), 1e-3),
    "rescale_": lambda model, inputs: attnscale.rescale_(model, 0.01, inputs),
    "calibrate_": attnscale.calibrate_,
}


@pytest.mark.parametrize("act", ACTIONS)
@pytest.mark.parametrize("kind", WRAPS)
def test_parametrized_queries_and_keys_are_left_and_nothing_of_them_changes(kind, act):
    model, inputs = made(WRAPS[kind], "q", "k")
    before = before_and(model)
    report = ACTIONS[act](model, inputs)
    assert not report.heads
    assert {left.head for left in report.left} == set(range(HEADS))
    assert all("is parametrised" in left.reason for left in report.left)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("kind", WRAPS)
def test_where_one_side_is_parametrized_the_other_takes_the_whole_factor(kind, side):
    model, inputs = made(WRAPS[kind], side, "v")
    seen = watched(model, inputs)
    threshold = 0.3 * largest(model, inputs)
    report = attnscale.clip_qk_(model, seen, threshold)
    other = {"q": "k", "k": "q"}[side]
    assert {each.parameter for head in report.heads for each in head.touched} == {
        f"{other}_proj.weight",
        f"{other}_proj.bias",
    }
    assert largest(model, inputs) == pytest.approx(threshold, rel=1e-4)
