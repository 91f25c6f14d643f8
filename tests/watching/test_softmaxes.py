"""Operations that only resemble a softmax are not counted, and reported if they mix values; the zoo has real ones."""

import pytest
import torch
from torch import nn

import attnscale
from attnscale.errors import NotFollowedWarning
from tests.watching.layers import Plain
from tests.zoo.entry import Block, SelfAttention


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


@pytest.mark.parametrize("weights", NONE)
def test_weights_of_no_softmax_are_not_taken_for_attention_and_are_told_of_beside_one_that_is(weights):
    model = nn.Sequential(Block(33, Weighing(weights)), Block(33, Plain(33, 3)))
    with pytest.warns(NotFollowedWarning, match=r"0\.attention"), attnscale.watch(model) as seen:
        model(torch.randn(2, 7, 33))
    assert list(seen.layers) == ["1.attention"]
    assert seen.unfollowed == ["0.attention"]


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


def stacked(x, logits, experts, weight):
    return logits.softmax(-1).unsqueeze(-2) @ torch.stack([expert(x) for expert in experts], -2)


def stacked_last(x, logits, experts, weight):
    return (torch.stack([expert(x) for expert in experts], -1) @ logits.softmax(-1).unsqueeze(-1)).mT


def in_one_weight(x, logits, experts, weight):
    return torch.einsum("bne,bnef->bnf", logits.softmax(-1), torch.einsum("bnd,edf->bnef", x, weight)).unsqueeze(-2)


def summed(x, logits, experts, weight):
    return (logits.softmax(-1).unsqueeze(-1) * torch.stack([expert(x) for expert in experts], -2)).sum(-2, keepdim=True)


def largest_two(x, logits, experts, weight):
    best, which = logits.topk(2, -1)
    outputs = torch.stack([expert(x) for expert in experts], -2)
    return best.softmax(-1).unsqueeze(-2) @ outputs.gather(-2, which[..., None].expand(*x.shape[:2], 2, 33))


def dispatched(x, logits, experts, weight):
    """GShard's: tokens go to places of experts, and come back by their weights."""
    tokens, weights = x.flatten(0, 1), logits.flatten(0, 1).softmax(-1)
    chosen = nn.functional.one_hot(weights.argmax(-1), 3)
    place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
    dispatch = (chosen[..., None] * nn.functional.one_hot(place, len(tokens))[:, None]).float()
    outputs = torch.einsum("tec,td->ecd", dispatch, tokens) @ weight
    return torch.einsum("tec,ecd->td", weights[..., None] * dispatch, outputs).view_as(x).unsqueeze(-2)


class Routed(nn.Module):
    """An attention, experts by a router, and a loss over classes."""

    def __init__(self, mix):
        super().__init__()
        self.attention, self.gate, self.head, self.mix = Plain(33, 3), nn.Linear(33, 3), nn.Linear(33, 11), mix
        self.experts = nn.ModuleList(nn.Linear(33, 33) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(3, 33, 33) / 6)

    def forward(self, x):
        x = self.attention(x)
        x = x + self.mix(x, self.gate(x), self.experts, self.weight).squeeze(-2)
        logits = self.head(x).flatten(0, 1)
        return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


@pytest.mark.parametrize("mix", [stacked, stacked_last, in_one_weight, summed, largest_two, dispatched])
def test_a_router_and_a_loss_are_not_told_of_as_attention(mix):
    model, x = Routed(mix), torch.randn(2, 7, 33)
    with attnscale.watch(model) as seen:
        model(x)
    assert list(seen.layers) == ["attention"]
    assert attnscale.audit(model, x).unchecked == ()


def contrastive(x, head):
    first, second = (nn.functional.normalize(each.mean(1), dim=-1) for each in (x, head(x)[..., : x.shape[-1]]))
    return nn.functional.cross_entropy(first @ second.mT / 0.07, torch.arange(len(x)))


def with_z_loss(x, head):
    logits = head(x)
    return -logits.log_softmax(-1)[..., 0].mean() + 1e-4 * logits.logsumexp(-1).square().mean()


def distilled(x, head):
    return nn.functional.kl_div(head(x).log_softmax(-1), head(x.flip(0)).softmax(-1), reduction="batchmean")


def of_entropy(x, head):
    weights = head(x).softmax(-1)
    return -(weights * weights.log()).sum()


@pytest.mark.parametrize("loss", [contrastive, with_z_loss, distilled, of_entropy])
def test_a_loss_is_not_told_of_as_attention(loss):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = Plain(33, 3), nn.Linear(33, 34)

        def forward(self, x):
            return loss(self.attention(x), self.head)

    model, x = Model(), torch.randn(2, 7, 33)
    audit = attnscale.audit(model, x)
    assert list(audit.layers) == ["attention"]
    assert audit.unchecked == ()


class Synthesizer(nn.Module):
    """Weights over positions by a projection of each token; the values are a sequence."""

    def __init__(self):
        super().__init__()
        self.weights, self.values = nn.Linear(33, 7), nn.Linear(33, 33)

    def forward(self, x):
        return self.weights(x).softmax(-1) @ self.values(x)


class Additive(nn.Module):
    """Bahdanau's attention."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.score = nn.Linear(33, 33), nn.Linear(33, 33), nn.Linear(33, 1)

    def forward(self, x):
        scores = self.score((self.query(x).unsqueeze(2) + self.key(x).unsqueeze(1)).tanh()).squeeze(-1)
        return scores.softmax(-1) @ x


@pytest.mark.parametrize("kind", [Synthesizer, Additive])
def test_weights_of_no_product_that_mix_a_sequence_are_told_of(kind):
    model = nn.Sequential(Plain(33, 3), kind())
    with pytest.warns(NotFollowedWarning, match="1 modules are left out"), attnscale.watch(model) as seen:
        model(torch.randn(2, 7, 33))
    assert seen.unfollowed == ["1"]
