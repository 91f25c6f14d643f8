"""The ways to write a softmax."""

import torch
import torch.nn.functional as F
from torch import nn

from .bases import SelfAttention, above_diagonal, note
from .entry import correct


@correct(33, 3, step="weigh")
def function(self, scores):
    return torch.softmax(scores, -1)


@correct(39, 3, step="weigh")
def functional(self, scores):
    return F.softmax(scores, dim=3)


@correct(35, 5, step="weigh")
def in_float32(self, scores):
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


@correct(38, 2, train=True)
class Modules(SelfAttention):
    """nn.Softmax and nn.Dropout, as modules of the attention."""

    def add_parts(self):
        self.softmax, self.drop = nn.Softmax(dim=-1), nn.Dropout(0.2)

    def weigh(self, scores):
        return self.drop(self.softmax(scores))


@correct(46, 2, train=True, step="weigh")
def with_dropout(self, scores):
    """Dropout on the weights, which multiplies those it leaves by 1/(1 − p)."""
    return F.dropout(scores.softmax(-1), 0.3, self.training)


@correct(51, 3, step="weigh")
def exp_over_sum(self, scores):
    powers = torch.exp(scores)
    return powers / powers.sum(dim=-1, keepdim=True)


@correct(57, 3, statistics="shape", step="weigh")
def exp_over_sum_less_the_maximum(self, scores):
    powers = (scores - scores.max(dim=-1, keepdim=True).values).exp()
    return powers / powers.sum(dim=-1, keepdim=True)


@correct(69, 3, statistics="shape", step="weigh")
def less_the_maximum(self, scores):
    """The maximum taken off by hand, and then again by softmax."""
    return (scores - scores.amax(-1, keepdim=True).detach()).softmax(-1)


@correct(44, 4, statistics="shape", gradients=False, step="weigh")
def exp_over_sum_in_place(self, scores):
    powers = (scores - scores.amax(-1, keepdim=True)).exp_()
    return powers.div_(powers.sum(-1, keepdim=True) + 1e-9)


@correct(52, 4, step="weigh")
def exp_of_log_softmax(self, scores):
    return F.log_softmax(scores, dim=-1).exp()


@correct(55, 5, step="weigh")
def exp_less_log_sum_exp(self, scores):
    return torch.exp(scores - torch.logsumexp(scores, dim=-1, keepdim=True))


@correct(58, 2, step="weigh")
def exp_less_log_sum_exp_of_all_keys(self, scores):
    """The row's number is made to fit by hand."""
    return torch.exp(scores - torch.logsumexp(scores, dim=-1).unsqueeze(-1))


@correct(62, 2, step="weigh")
def exp_less_log_of_sum(self, scores):
    return torch.exp(scores - torch.exp(scores).sum(-1, keepdim=True).log())


@correct(74, 2, statistics="shape", step="weigh")
def exp_less_maximum_and_log_of_sum(self, scores):
    below = scores - scores.amax(-1, keepdim=True)
    return torch.exp(below - below.exp().sum(-1, keepdim=True).log())


@correct(78, 3, step="weigh")
def exp_less_log_sum_exp_by_hand(self, scores):
    """The maximum taken off inside the logarithm, and put back outside."""
    highest = scores.amax(-1, keepdim=True)
    return torch.exp(scores - (highest + (scores - highest).exp().sum(-1, keepdim=True).log()))


@correct(82, 2, step="weigh")
def exp_of_log_softmax_copied(self, scores):
    """Cast and copied on the way, as mixed precision does."""
    return F.log_softmax(scores, dim=-1).float().clone().exp()


@correct(85, 5, step="weigh")
def exp_times_inverse_sum(self, scores):
    powers = torch.exp(scores)
    return powers * powers.sum(dim=-1, keepdim=True).reciprocal()


@correct(86, 2, step="weigh")
def inverse_sum_times_exp(self, scores):
    powers = torch.exp(scores)
    return (1 / powers.sum(dim=-1, keepdim=True)) * powers


class NormalisedLast(SelfAttention):
    def weigh(self, scores):
        return scores.exp()


@correct(87, 3, step="mix", base=NormalisedLast)
def mixed_then_times_inverse_sum(self, powers, value):
    return (powers @ value) * powers.sum(-1, keepdim=True) ** -1


@correct(65, 5, causal=True, step="attend")
def exp_times_mask(self, query, key, value):
    """A mask that multiplies the powers."""
    scores, hidden = query @ key.mT * self.head_dim**-0.5, above_diagonal(query.shape[2])
    note(self, scores, hidden=hidden)
    powers = torch.exp(scores) * (~hidden).float()
    return (powers / powers.sum(-1, keepdim=True)) @ value


@correct(34, 2, step="mix", base=NormalisedLast)
def normalised_after_mixing(self, powers, value):
    """exp(scores) @ v, divided by the sums only then, as fused kernels do."""
    return (powers @ value) / powers.sum(-1, keepdim=True)


@correct(68, 4, step="weigh")
def powers_of_two(self, scores):
    """2 to the scores over ln 2: the scale carries log₂ e."""
    powers = torch.exp2(scores * 1.4426950408889634)
    return powers / powers.sum(-1, keepdim=True)


@correct(63, 3, step="weigh")
def weights_returned(self, scores):
    """Weights that are also kept, averaged and logged: what people do to look at them."""
    weights = scores.softmax(-1)
    self.last = weights.detach().mean(1)
    self.entropy = -(weights * (weights + 1e-9).log()).sum(-1).mean()
    return weights
