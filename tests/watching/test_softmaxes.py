"""What is no softmax is not taken for one, and is told of where it mixes values; the zoo holds those that are."""

import pytest
import torch
from torch import nn

import attnscale
from attnscale.errors import AttnscaleError, NotFollowedWarning
from attnscale.watching import watcher
from tests.zoo.entry import Block, SelfAttention


@pytest.fixture(autouse=True)
def failures_raise(monkeypatch):
    monkeypatch.setattr(watcher, "RAISE_FAILURES", True)


def over_root_of_sum(scores):
    powers = scores.exp()
    return powers / powers.sum(-1, keepdim=True).sqrt()


def over_twice_the_sum(scores):
    powers = scores.exp()
    return powers / (2 * powers.sum(-1, keepdim=True))


def times_the_sum(scores):
    powers = scores.exp()
    return powers * powers.sum(-1, keepdim=True)


def times_twice_the_inverse(scores):
    powers = scores.exp()
    return powers * (2 / powers.sum(-1, keepdim=True))


def less_twice_the_log_sum(scores):
    return torch.exp(scores - 2 * torch.logsumexp(scores, -1, keepdim=True))


def less_the_log_sum_and_the_maximum(scores):
    return torch.exp(scores - (torch.logsumexp(scores, -1, keepdim=True) + scores.amax(-1, keepdim=True)))


def never_normalised(scores):
    return scores.exp()


def over_the_sum_of_others(scores):
    return scores.exp() / (2 * scores).exp().sum(-1, keepdim=True)


def over_the_sum_of_squares(scores):
    powers = scores.exp()
    return powers / powers.square().sum(-1, keepdim=True)


def over_the_root_of_the_sum_of_squares(scores):
    powers = scores.exp()
    return powers / powers.norm(dim=-1, keepdim=True)


NONE = (
    over_the_sum_of_squares, over_the_root_of_the_sum_of_squares,
    over_root_of_sum, over_twice_the_sum, times_the_sum, times_twice_the_inverse, less_twice_the_log_sum,
    less_the_log_sum_and_the_maximum, never_normalised, over_the_sum_of_others,
)  # fmt: skip


class Weighing(SelfAttention):
    """An attention but for its weights, which are those of no softmax."""

    def __init__(self, weights):
        super().__init__(33, 3)
        self.weights = weights

    def forward(self, x):
        query, key, value = self.project(x)
        return self.merge(self.weights(query @ key.mT * self.head_dim**-0.5) @ value)


class Plain(SelfAttention):
    def forward(self, x):
        query, key, value = self.project(x)
        return self.merge(torch.softmax(query @ key.mT * self.head_dim**-0.5, -1) @ value)


@pytest.mark.parametrize("weights", NONE)
def test_weights_of_no_softmax_are_not_taken_for_attention_and_are_told_of_beside_one_that_is(weights):
    model = nn.Sequential(Block(33, Weighing(weights)), Block(33, Plain(33, 3)))
    with pytest.warns(NotFollowedWarning, match=r"0\.attention"), attnscale.watch(model) as seen:
        model(torch.randn(2, 7, 33))
    assert list(seen.layers) == ["1.attention"]
    assert seen.unfollowed == ["0.attention"]


@pytest.mark.parametrize("weights", NONE)
def test_weights_of_no_softmax_alone_are_no_attention(weights):
    with pytest.raises(AttnscaleError, match="saw none"), attnscale.watch(model := Weighing(weights)):
        model(torch.randn(2, 7, 33))


def test_a_logarithm_of_weights_that_only_a_loss_takes_is_no_attention():
    class WithHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = Plain(33, 3), nn.Linear(33, 11)

        def forward(self, x):
            logits = self.head(self.attention(x))
            return logits - logits.exp().sum(-1, keepdim=True).log()

    model = WithHead()
    with attnscale.watch(model) as seen:
        model(torch.randn(2, 7, 33))
    assert list(seen.layers) == ["attention"]
