"""Weights that are made of other parameters: scores meet the threshold, or the report says why they do not."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import spectral_norm as older_spectral_norm

import attnscale

from .models import Attention, before_and, watched

D_MODEL, HEADS, LENGTH = 55, 5, 13
pytestmark = pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated")


class Norm(nn.Module):
    """Divides by a number that is computed from the weight, where no operation tells."""

    def forward(self, weight):
        return weight / float(weight.detach().norm())


class Clamped(nn.Module):
    """Lets no element pass a limit."""

    def forward(self, weight):
        return weight.clamp(-0.05, 0.05)


class Halves(nn.Module):
    """Put together of two."""

    def forward(self, first, second):
        return torch.cat([first, second])

    def right_inverse(self, weight):
        return weight[:33].clone(), weight[33:].clone()


class Transposed(nn.Module):
    """Kept the other way round, and thrice as large."""

    def forward(self, weight):
        return 3.0 * weight.mT

    def right_inverse(self, weight):
        return weight.mT / 3.0


class Refuses(nn.Module):
    """Runs where a model runs, and nowhere else."""

    def forward(self, weight):
        if not self.training:
            raise RuntimeError("not in evaluation")
        return 1.0 * weight


def by(kind):
    return lambda layer: parametrize.register_parametrization(layer, "weight", kind())


TAKES_BACK = {
    "spectral norm": parametrizations.spectral_norm,
    "older spectral norm": older_spectral_norm,
    "norm": by(Norm),
    "limit": by(Clamped),
}
PASSES_ON = {"weight norm": parametrizations.weight_norm, "halves": by(Halves), "transposed": by(Transposed)}


def made(wrap, *sides, dtype=torch.float32):
    torch.manual_seed(5)
    model = Attention(D_MODEL, HEADS)
    for side in sides:
        wrap(getattr(model, f"{side}_proj"))
    return model.eval().to(dtype), (torch.randn(2, LENGTH, D_MODEL, dtype=dtype),)


def largest(model, inputs):
    (layer,) = watched(model, inputs).layers.values()
    return float(layer.stats.max.max())


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", TAKES_BACK)
def test_heads_whose_weights_take_a_factor_back_are_left_and_nothing_of_them_changes(kind, dtype):
    model, inputs = made(TAKES_BACK[kind], "q", "k", dtype=dtype)
    model.train()
    seen, before = watched(model, inputs), state(model)
    report = attnscale.clip_qk_(model, seen, 0.3 * largest(model.eval(), inputs))
    assert not report.heads
    assert {left.head for left in report.left} == set(range(HEADS))
    name = "weight_orig" if "older" in kind else "parametrizations.weight.original"
    assert {left.reason for left in report.left} == {f"what is made of q_proj.{name} is no multiple of it"}
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("kind", TAKES_BACK)
def test_where_one_side_takes_a_factor_back_the_other_takes_all_of_it(kind, side):
    model, inputs = made(TAKES_BACK[kind], side, "v")
    seen = watched(model, inputs)
    threshold = 0.3 * largest(model, inputs)
    report = attnscale.clip_qk_(model, seen, threshold)
    other = {"q": "k", "k": "q"}[side]
    assert {each.parameter for head in report.heads for each in head.touched} == {
        f"{other}_proj.weight",
        f"{other}_proj.bias",
    }
    assert largest(model, inputs) == pytest.approx(threshold, rel=1e-4)


@pytest.mark.parametrize("kind", PASSES_ON)
def test_what_passes_every_factor_on_is_clipped_through_its_originals(kind):
    model, inputs = made(PASSES_ON[kind], "q", "k", "v")
    threshold = 0.3 * largest(model, inputs)
    report = attnscale.clip_qk_(model, watched(model, inputs), threshold)
    assert not report.left
    assert any("parametrizations" in each.parameter for head in report.heads for each in head.touched)
    assert largest(model, inputs) == pytest.approx(threshold, rel=1e-4)


def test_what_cannot_be_tried_is_left_and_that_is_told():
    model, inputs = made(by(Refuses), "q", "k")
    report = attnscale.clip_qk_(model, watched(model.train(), inputs), 1e-3)
    assert not report.heads
    assert all(left.reason.endswith("cannot be tried: RuntimeError: not in evaluation") for left in report.left)


@pytest.mark.parametrize("act", [lambda *given: attnscale.rescale_(given[0], 0.01, given[1]), attnscale.calibrate_])
def test_no_scale_is_folded_into_what_takes_it_back(act):
    model, inputs = made(parametrizations.spectral_norm, "q", "k")
    before = before_and(model)
    report = act(model, inputs)
    assert not report.heads
    assert {left.head for left in report.left} == set(range(HEADS))
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_qk_clip_leaves_at_every_step_what_takes_a_factor_back():
    model, inputs = made(parametrizations.spectral_norm, "q", "k")
    model.train()
    before, left = before_and(model), []
    with attnscale.QKClip(model, 1e-3) as clip:
        for _ in range(3):
            model(*inputs).square().mean().backward()
            clip.step()
            assert clip.last is not None
            assert not clip.last.heads
            left += clip.last.left
    assert len(left) == 3 * HEADS
    assert all("is no multiple of it" in each.reason for each in left)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
