"""Operations that only resemble a softmax are not counted, and reported if they mix values; the zoo has real ones."""

import pytest
import torch
from torch import nn

import attnscale
from attnscale.errors import NotFollowedWarning
from tests.watching.layers import Plain
from tests.zoo.entry import Block, SelfAttention


def row_sum(powers):
    return powers.sum(-1, keepdim=True)


NO_SOFTMAX = {  # functions of the scores and of their exponentials
    "over the sum of squares": lambda scores, powers: powers / row_sum(powers.square()),
    "over the root of the sum of squares": lambda scores, powers: powers / powers.norm(dim=-1, keepdim=True),
    "over the root of the sum": lambda scores, powers: powers / row_sum(powers).sqrt(),
    "over twice the sum": lambda scores, powers: powers / (2 * row_sum(powers)),
    "times the sum": lambda scores, powers: powers * row_sum(powers),
    "times twice the inverse": lambda scores, powers: powers * (2 / row_sum(powers)),
    "less twice the log-sum": lambda scores, _: torch.exp(scores - 2 * scores.logsumexp(-1, keepdim=True)),
    "less the log-sum and the maximum": lambda scores, _: torch.exp(
        scores - (scores.logsumexp(-1, keepdim=True) + scores.amax(-1, keepdim=True))
    ),
    "never normalised": lambda scores, powers: powers,
    "over the sum of others": lambda scores, powers: powers / row_sum((2 * scores).exp()),
}


class Weighing(SelfAttention):
    """An attention but for its weights, which are those of no softmax."""

    def __init__(self, weights):
        super().__init__(33, 3)
        self.weights = weights

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.mT * self.head_dim**-0.5
        return self.merge(self.weights(scores, scores.exp()) @ value)


@pytest.mark.parametrize("name", NO_SOFTMAX)
def test_weights_of_no_softmax_are_not_attention_and_are_reported_beside_one_that_is(name):
    model = nn.Sequential(Block(33, Weighing(NO_SOFTMAX[name])), Block(33, Plain(33, 3)))
    with pytest.warns(NotFollowedWarning, match=r"0\.attention"), attnscale.watch(model) as seen:
        model(torch.randn(2, 7, 33))
    assert list(seen.layers) == ["1.attention"]
    assert seen.unfollowed == ["0.attention"]


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
def test_a_router_and_a_loss_give_no_warning_of_missed_attention(mix):
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


def of_logits_less_the_log_of_their_sum(x, head):
    return head(x) - head(x).exp().sum(-1, keepdim=True).log()


class WithLoss(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.attention, self.head, self.loss = Plain(33, 3), nn.Linear(33, 34), loss

    def forward(self, x):
        return self.loss(self.attention(x), self.head)


LOSSES = (contrastive, with_z_loss, distilled, of_entropy, of_logits_less_the_log_of_their_sum)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_not_reported_as_attention(loss):
    audit = attnscale.audit(WithLoss(loss), torch.randn(2, 7, 33))
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
def test_weights_without_a_product_that_mix_a_sequence_give_a_warning(kind):
    model = nn.Sequential(Plain(33, 3), kind())
    with pytest.warns(NotFollowedWarning, match="1 modules are left out"), attnscale.watch(model) as seen:
        model(torch.randn(2, 7, 33))
    assert seen.unfollowed == ["1"]
