"""An audit says what it did not judge, and a model without attention that can be read is a result."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnscale import audit
from attnscale.errors import AttnscaleError
from tests.zoo import ENTRIES

pytestmark = pytest.mark.filterwarnings("default::attnscale.errors.NotFollowedWarning")


class Projected(nn.Module):
    """Queries, keys and values of one head; a subclass does with them what is no softmax of a product."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(22, 22) for _ in range(3))
        self.score = nn.Linear(22, 1)

    def forward(self, x):
        return self.attend(self.query(x), self.key(x), self.value(x))


class LinearAttention(Projected):
    def attend(self, query, key, value):
        query, key = F.elu(query) + 1, F.elu(key) + 1
        return query @ (key.mT @ value) / (query @ key.sum(1, keepdim=True).mT)


class SigmoidAttention(Projected):
    def attend(self, query, key, value):
        return torch.sigmoid(query @ key.mT / 22**0.5 - math.log(key.shape[1])) @ value


class AdditiveAttention(Projected):
    def attend(self, query, key, value):
        energy = self.score(torch.tanh(query[:, :, None] + key[:, None])).squeeze(-1)
        return energy.softmax(-1) @ value


class SparsemaxAttention(Projected):
    def attend(self, query, key, value):
        scores = query @ key.mT / 22**0.5
        ordered = scores.sort(-1, descending=True).values
        excess, count = ordered.cumsum(-1) - 1, torch.arange(1, scores.shape[-1] + 1)
        support = (count * ordered > excess).sum(-1, keepdim=True)
        return (scores - excess.gather(-1, support - 1) / support).clamp(min=0) @ value


class OnlineSoftmaxAttention(Projected):
    """Flash attention by hand: keys in blocks, a running maximum and a running sum."""

    def attend(self, query, key, value):
        top = torch.full((*query.shape[:2], 1), -torch.inf)
        total, mixed = torch.zeros_like(top), torch.zeros_like(query)
        for some, theirs in zip(key.split(5, 1), value.split(5, 1), strict=True):
            scores = query @ some.mT / 22**0.5
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            powers, less = (scores - higher).exp(), (top - higher).exp()
            total, mixed, top = total * less + powers.sum(-1, keepdim=True), mixed * less + powers @ theirs, higher
        return mixed / total


class Retention(Projected):
    def attend(self, query, key, value):
        place = torch.arange(query.shape[1])
        return (query @ key.mT * 0.9 ** (place[:, None] - place).clamp(min=0)).tril() @ value


@pytest.mark.parametrize(
    "kind",
    [LinearAttention, SigmoidAttention, AdditiveAttention, SparsemaxAttention, OnlineSoftmaxAttention, Retention],
)
def test_attention_that_cannot_be_read_is_a_result_that_says_so(kind):
    found = audit(kind(), torch.randn(2, 13, 22))
    assert (found.layers, found.findings, found.worst) == ({}, [], None)
    assert "No attention could be read, so nothing was judged." in str(found)
    assert "No fused attention kernel ran" in found.unchecked[0]


def test_where_weights_of_unknown_origin_mix_values_is_said():
    model = nn.Sequential(AdditiveAttention(), OnlineSoftmaxAttention())
    told = audit(model, torch.randn(2, 13, 22)).unchecked
    assert any("the one softmax that ran took no product" in sentence for sentence in told)
    assert "Values are mixed by weights of unknown origin in 0, 1." in told


def test_modules_named_after_attention_in_which_none_was_seen_are_listed():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.read = nn.MultiheadAttention(22, 2, batch_first=True)
            self.linear, self.idle = LinearAttention(), SigmoidAttention()

        def forward(self, x):
            return self.linear(self.read(x, x, x)[0])

    found = audit(Both(), torch.randn(2, 13, 22))
    assert list(found.layers) == ["read"]
    assert "Modules named after attention in which none ran: linear, idle." in found.unchecked


def test_a_softmax_over_positions_that_is_no_attention_is_counted():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.score = nn.MultiheadAttention(22, 2, batch_first=True), nn.Linear(22, 1)

        def forward(self, x):
            mixed, _ = self.attention(x, x, x, need_weights=False)
            return mixed * self.score(mixed).softmax(1)

    found = audit(Pooled(), torch.randn(2, 13, 22))
    assert found.unchecked == (
        "1 softmax takes no product of two activations, in Pooled: not attention, or not recognised.",
    )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("products.AsPrinted", ""),
        ("designs_of_weights.Differential", "It was not checked that the weights"),
        ("designs_of_axes.CrossCovariance", "channels attend to channels"),
        ("designs_of_scale.ScalableSoftmaxCausal", "differs from row to row"),
        ("designs_of_scale.ScalableSoftmaxInAKernel", "differs from row to row"),
        ("structures.TalkingHeads", "was not recognised"),
    ],
)
def test_what_could_not_be_checked_is_said_with_the_reason(name, why):
    model, inputs = ENTRIES[name].build()
    found = audit(model, *inputs)
    assert any(why in sentence for sentence in found.unchecked) if why else found.unchecked == ()
    assert found.to_dict()["unchecked"] == list(found.unchecked)


def test_a_model_that_was_not_run_is_an_error():
    class Idle(nn.Module):
        def __call__(self, x):
            return x

    with pytest.raises(AttnscaleError, match="no module of it was called"):
        audit(Idle(), torch.randn(2, 3))


class ComputedTemperature(Projected):
    def attend(self, query, key, value):
        return (query @ key.mT / (query.abs().mean() + 1.5)).softmax(-1) @ value


class ComputedForAKernel(Projected):
    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query * (query.abs().mean() + 1.5), key, value)


@pytest.mark.parametrize("kind", [ComputedTemperature, ComputedForAKernel])
def test_a_multiplier_that_is_computed_from_activations_is_not_judged_and_nothing_found_is_not_said(kind):
    torch.manual_seed(0)
    found = audit(kind(), torch.randn(2, 13, 22))
    assert found.findings == []
    assert "its multiplier is computed from activations" in " ".join(found.unchecked)
    assert "Nothing found" not in str(found)
