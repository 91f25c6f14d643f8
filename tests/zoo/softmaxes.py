"""The ways to write a softmax."""

import torch
import torch.nn.functional as F
from torch import nn

from .entry import SelfAttention, above_diagonal, correct
from .recording import note


@correct(33, 3)
class Function(SelfAttention):
    def weigh(self, scores):
        return torch.softmax(scores, -1)


@correct(39, 3)
class Functional(SelfAttention):
    def weigh(self, scores):
        return F.softmax(scores, dim=3)


@correct(35, 5)
class InFloat32(SelfAttention):
    def weigh(self, scores):
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


@correct(38, 2, train=True)
class Modules(SelfAttention):
    """nn.Softmax and nn.Dropout, as modules of the attention."""

    def add_parts(self):
        self.softmax, self.drop = nn.Softmax(dim=-1), nn.Dropout(0.2)

    def weigh(self, scores):
        return self.drop(self.softmax(scores))


@correct(46, 2, train=True)
class WithDropout(SelfAttention):
    """Dropout on the weights, which multiplies those it leaves by 1/(1 − p)."""

    def weigh(self, scores):
        return F.dropout(scores.softmax(-1), 0.3, self.training)


@correct(51, 3)
class ExpOverSum(SelfAttention):
    def weigh(self, scores):
        powers = torch.exp(scores)
        return powers / powers.sum(dim=-1, keepdim=True)


@correct(57, 3, statistics="shape")
class ExpOverSumLessTheMaximum(SelfAttention):
    def weigh(self, scores):
        powers = (scores - scores.max(dim=-1, keepdim=True).values).exp()
        return powers / powers.sum(dim=-1, keepdim=True)


@correct(69, 3, statistics="shape")
class LessTheMaximum(SelfAttention):
    """The maximum taken off by hand, and then again by softmax."""

    def weigh(self, scores):
        return (scores - scores.amax(-1, keepdim=True).detach()).softmax(-1)


@correct(44, 4, statistics="shape", gradients=False)
class ExpOverSumInPlace(SelfAttention):
    def weigh(self, scores):
        powers = (scores - scores.amax(-1, keepdim=True)).exp_()
        return powers.div_(powers.sum(-1, keepdim=True) + 1e-9)


@correct(52, 4)
class ExpOfLogSoftmax(SelfAttention):
    def weigh(self, scores):
        return F.log_softmax(scores, dim=-1).exp()


@correct(55, 5)
class ExpLessLogSumExp(SelfAttention):
    def weigh(self, scores):
        return torch.exp(scores - torch.logsumexp(scores, dim=-1, keepdim=True))


@correct(58, 2)
class ExpLessLogSumExpOfAllKeys(SelfAttention):
    """The row's number is made to fit by hand."""

    def weigh(self, scores):
        return torch.exp(scores - torch.logsumexp(scores, dim=-1).unsqueeze(-1))


@correct(62, 2)
class ExpLessLogOfSum(SelfAttention):
    def weigh(self, scores):
        return torch.exp(scores - torch.exp(scores).sum(-1, keepdim=True).log())


@correct(74, 2, statistics="shape")
class ExpLessMaximumAndLogOfSum(SelfAttention):
    def weigh(self, scores):
        below = scores - scores.amax(-1, keepdim=True)
        return torch.exp(below - below.exp().sum(-1, keepdim=True).log())


@correct(78, 3)
class ExpLessLogSumExpByHand(SelfAttention):
    """The maximum taken off inside the logarithm, and put back outside."""

    def weigh(self, scores):
        highest = scores.amax(-1, keepdim=True)
        return torch.exp(scores - (highest + (scores - highest).exp().sum(-1, keepdim=True).log()))


@correct(82, 2)
class ExpOfLogSoftmaxCopied(SelfAttention):
    """Cast and copied on the way, as mixed precision does."""

    def weigh(self, scores):
        return F.log_softmax(scores, dim=-1).float().clone().exp()


@correct(85, 5)
class ExpTimesInverseSum(SelfAttention):
    def weigh(self, scores):
        powers = torch.exp(scores)
        return powers * powers.sum(dim=-1, keepdim=True).reciprocal()


@correct(86, 2)
class InverseSumTimesExp(SelfAttention):
    def weigh(self, scores):
        powers = torch.exp(scores)
        return (1 / powers.sum(dim=-1, keepdim=True)) * powers


class NormalisedLast(SelfAttention):
    def weigh(self, scores):
        return scores.exp()


@correct(87, 3)
class MixedThenTimesInverseSum(NormalisedLast):
    def mix(self, powers, value):
        return (powers @ value) * powers.sum(-1, keepdim=True) ** -1


@correct(65, 5, causal=True)
class ExpTimesMask(SelfAttention):
    """A mask that multiplies the powers."""

    def attend(self, query, key, value):
        scores, hidden = query @ key.mT * self.head_dim**-0.5, above_diagonal(query.shape[2])
        note(self, scores, hidden=hidden)
        powers = torch.exp(scores) * (~hidden).float()
        return (powers / powers.sum(-1, keepdim=True)) @ value


@correct(34, 2)
class NormalisedAfterMixing(NormalisedLast):
    """exp(scores) @ v, divided by the sums only then, as fused kernels do."""

    def mix(self, powers, value):
        return (powers @ value) / powers.sum(-1, keepdim=True)


@correct(68, 4)
class PowersOfTwo(SelfAttention):
    """2 to the scores over ln 2: the scale carries log₂ e."""

    def weigh(self, scores):
        powers = torch.exp2(scores * 1.4426950408889634)
        return powers / powers.sum(-1, keepdim=True)


@correct(63, 3)
class WeightsReturned(SelfAttention):
    """Weights that are also kept, averaged and logged: what people do to look at them."""

    def weigh(self, scores):
        weights = scores.softmax(-1)
        self.last = weights.detach().mean(1)
        self.entropy = -(weights * (weights + 1e-9).log()).sum(-1).mean()
        return weights
