"""An audit says what it did not judge, and a model without attention that can be read is a result."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnscale import audit
from tests.zoo import ENTRIES
from tests.zoo.entry import Block, SelfAttention, above_diagonal

pytestmark = pytest.mark.filterwarnings("default::attnscale.errors.NotFollowedWarning")


class Attention(nn.Module):
    """Queries, keys and values of one head, and what is done with them."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.query, self.key, self.value = (nn.Linear(22, 22) for _ in range(3))
        self.score = nn.Linear(22, 1)

    def forward(self, x):
        return self.attend(self, self.query(x), self.key(x), self.value(x))


def linear(model, query, key, value):
    query, key = F.elu(query) + 1, F.elu(key) + 1
    return query @ (key.mT @ value) / (query @ key.sum(1, keepdim=True).mT)


def sigmoid(model, query, key, value):
    return torch.sigmoid(query @ key.mT / 22**0.5 - math.log(key.shape[1])) @ value


def additive(model, query, key, value):
    energy = model.score(torch.tanh(query[:, :, None] + key[:, None])).squeeze(-1)
    return energy.softmax(-1) @ value


def online_softmax(model, query, key, value):
    """Flash attention by hand: keys in blocks, a running maximum and a running sum."""
    top = torch.full((*query.shape[:2], 1), -torch.inf)
    total, mixed = torch.zeros_like(top), torch.zeros_like(query)
    for some, theirs in zip(key.split(5, 1), value.split(5, 1), strict=True):
        scores = query @ some.mT / 22**0.5
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        powers, less = (scores - higher).exp(), (top - higher).exp()
        total, mixed, top = total * less + powers.sum(-1, keepdim=True), mixed * less + powers @ theirs, higher
    return mixed / total


@pytest.mark.parametrize("attend", [linear, sigmoid, additive, online_softmax])
def test_attention_that_cannot_be_read_gives_a_result_that_says_so(attend):
    found = audit(Attention(attend), torch.randn(2, 13, 22))
    assert (found.layers, found.findings, found.worst) == ({}, [], None)
    assert "No attention could be read, so nothing was judged." in str(found)
    assert "No fused attention kernel ran" in found.unchecked[0]


def test_modules_that_mix_values_by_weights_of_unknown_origin_are_listed():
    told = audit(nn.Sequential(Attention(additive), Attention(online_softmax)), torch.randn(2, 13, 22)).unchecked
    assert any("the one softmax that ran took no product" in sentence for sentence in told)
    assert "Values are mixed by weights of unknown origin in 0, 1." in told


class Both(nn.Module):
    """Attention that can be read, then attention that cannot; one more does not run."""

    def __init__(self, attend):
        super().__init__()
        self.read, self.unread, self.idle = Readable(22, 2, batch_first=True), Attention(attend), Attention(sigmoid)

    def forward(self, x):
        return self.unread(self.read(x, x, x)[0])


class Readable(nn.MultiheadAttention):
    pass


def pooled(model, query, key, value):
    return value * model.score(value).softmax(1)


def test_modules_named_after_attention_in_which_none_was_seen_are_listed():
    found = audit(Both(linear), torch.randn(2, 13, 22))
    assert list(found.layers) == ["read"]
    assert "Modules named after attention in which none ran: unread, idle." in found.unchecked


def test_a_softmax_over_positions_that_is_no_attention_is_counted():
    found = audit(Both(pooled), torch.randn(2, 13, 22))
    assert any(told.startswith("1 softmax takes no product of two activations, in unread:") for told in found.unchecked)


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
def test_an_audit_says_what_it_could_not_check_and_why(name, why):
    model, inputs = ENTRIES[name].build()
    found = audit(model, *inputs)
    assert any(why in sentence for sentence in found.unchecked) if why else found.unchecked == ()
    assert found.to_dict()["unchecked"] == list(found.unchecked)


def computed_temperature(model, query, key, value):
    return (query @ key.mT / (query.abs().mean() + 1.5)).softmax(-1) @ value


def computed_for_a_kernel(model, query, key, value):
    return F.scaled_dot_product_attention(query * (query.abs().mean() + 1.5), key, value)


@pytest.mark.parametrize("attend", [computed_temperature, computed_for_a_kernel])
def test_a_multiplier_computed_from_activations_is_not_judged(attend):
    found = audit(Attention(attend), torch.randn(2, 13, 22))
    assert found.findings == []
    assert "its multiplier is computed from activations" in " ".join(found.unchecked)
    assert "Nothing found" not in str(found)


class WithoutFinding(SelfAttention):
    """A mistake that docs/findings.md names as one that is not found; who finds one takes it off the list."""

    mistake = ""

    def forward(self, x):
        query, key, value = self.project(x)
        query, key = (query, query) if self.mistake == "the key is the query" else (query, key)
        scores = query @ key.mT / self.head_dim**0.5
        if self.mistake in HIDDEN:
            scores = scores.masked_fill(*HIDDEN[self.mistake])
        mixed = scores.softmax(-1) @ value
        is_mixed_up = self.mistake == "heads are merged in the wrong order"
        return self.out_proj(mixed.reshape(x.shape)) if is_mixed_up else self.merge(mixed)


HIDDEN = {
    "the mask is transposed": (above_diagonal(13).T, -torch.inf),
    "the mask is off by one": (torch.ones(13, 13, dtype=torch.bool).triu(2), -torch.inf),
    "a row is hidden by a finite mask": (torch.ones(13, 13, dtype=torch.bool).triu(0), -1e9),
}
OTHERS = ("heads are merged in the wrong order", "the key is the query", "the query is frozen")


@pytest.mark.parametrize("mistake", [*HIDDEN, *OTHERS])
def test_a_limit_that_is_documented_is_one(mistake):
    model = Block(44, WithoutFinding(44, 4))
    model.attention.mistake = mistake
    model.attention.q_proj.requires_grad_(mistake != "the query is frozen")
    assert audit(model, torch.randn(2, 13, 44)).findings == []
