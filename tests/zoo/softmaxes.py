"""The ways to write a softmax."""

import torch
import torch.nn.functional as F
from torch import nn

from .entry import SelfAttention, above_diagonal, correct
from .recording import note


class Scores(SelfAttention):
    """Everything but the softmax."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.transpose(-1, -2) * self.head_dim**-0.5
        note(self, scores)
        return self.merge(self.weights(scores) @ value)


@correct(33, 3)
class Function(Scores):
    def weights(self, scores):
        return torch.softmax(scores, -1)


@correct(39, 3)
class Functional(Scores):
    def weights(self, scores):
        return F.softmax(scores, dim=3)


@correct(35, 5)
class InFloat32(Scores):
    def weights(self, scores):
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


@correct(38, 2, train=True)
class Modules(Scores):
    """nn.Softmax and nn.Dropout, as modules of the attention."""

    def add_parts(self):
        self.softmax = nn.Softmax(dim=-1)
        self.drop = nn.Dropout(0.2)

    def weights(self, scores):
        return self.drop(self.softmax(scores))


@correct(46, 2, train=True)
class WithDropout(Scores):
    """Dropout on the weights, which multiplies those it leaves by 1/(1 − p)."""

    def weights(self, scores):
        return F.dropout(scores.softmax(-1), 0.3, self.training)


@correct(51, 3)
class ExpOverSum(Scores):
    def weights(self, scores):
        powers = torch.exp(scores)
        return powers / powers.sum(dim=-1, keepdim=True)


@correct(57, 3, statistics="shape")
class ExpOverSumLessTheMaximum(Scores):
    def weights(self, scores):
        powers = (scores - scores.max(dim=-1, keepdim=True).values).exp()
        return powers / powers.sum(dim=-1, keepdim=True)


@correct(69, 3, statistics="shape")
class LessTheMaximum(Scores):
    """The maximum taken off by hand, and then again by softmax."""

    def weights(self, scores):
        return (scores - scores.amax(-1, keepdim=True).detach()).softmax(-1)


@correct(44, 4, statistics="shape", gradients=False)
class ExpOverSumInPlace(Scores):
    def weights(self, scores):
        powers = (scores - scores.amax(-1, keepdim=True)).exp_()
        return powers.div_(powers.sum(-1, keepdim=True) + 1e-9)


@correct(52, 4)
class ExpOfLogSoftmax(Scores):
    def weights(self, scores):
        return F.log_softmax(scores, dim=-1).exp()


@correct(55, 5)
class ExpLessLogSumExp(Scores):
    def weights(self, scores):
        return torch.exp(scores - torch.logsumexp(scores, dim=-1, keepdim=True))


@correct(58, 2)
class ExpLessLogSumExpOfAllKeys(Scores):
    """The same with the row's number made to fit by hand."""

    def weights(self, scores):
        return torch.exp(scores - torch.logsumexp(scores, dim=-1).unsqueeze(-1))


@correct(62, 2)
class ExpLessLogOfSum(Scores):
    def weights(self, scores):
        return torch.exp(scores - torch.exp(scores).sum(-1, keepdim=True).log())


@correct(74, 2, statistics="shape")
class ExpLessMaximumAndLogOfSum(Scores):
    def weights(self, scores):
        below = scores - scores.amax(-1, keepdim=True)
        return torch.exp(below - below.exp().sum(-1, keepdim=True).log())


@correct(78, 3)
class ExpLessLogSumExpByHand(Scores):
    """The maximum taken off inside the logarithm, and put back outside."""

    def weights(self, scores):
        highest = scores.amax(-1, keepdim=True)
        return torch.exp(scores - (highest + (scores - highest).exp().sum(-1, keepdim=True).log()))


@correct(82, 2)
class ExpOfLogSoftmaxCopied(Scores):
    """Cast and copied on the way, as mixed precision does."""

    def weights(self, scores):
        return F.log_softmax(scores, dim=-1).float().clone().exp()


@correct(85, 5)
class ExpTimesInverseSum(Scores):
    def weights(self, scores):
        powers = torch.exp(scores)
        return powers * powers.sum(dim=-1, keepdim=True).reciprocal()


@correct(86, 2)
class InverseSumTimesExp(Scores):
    def weights(self, scores):
        powers = torch.exp(scores)
        return (1 / powers.sum(dim=-1, keepdim=True)) * powers


@correct(87, 3)
class MixedThenTimesInverseSum(SelfAttention):
    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.transpose(-1, -2) * self.head_dim**-0.5
        note(self, scores)
        powers = scores.exp()
        return self.merge((powers @ value) * powers.sum(-1, keepdim=True) ** -1)


@correct(65, 5, causal=True)
class ExpTimesMask(SelfAttention):
    """A mask that multiplies the powers."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.transpose(-1, -2) * self.head_dim**-0.5
        hidden = above_diagonal(x.shape[1])
        note(self, scores, hidden=hidden)
        powers = torch.exp(scores) * (~hidden).float()
        return self.merge((powers / powers.sum(-1, keepdim=True)) @ value)


@correct(34, 2)
class NormalisedAfterMixing(SelfAttention):
    """exp(scores) @ v, divided by the sums only then, as fused kernels do."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.transpose(-1, -2) * self.head_dim**-0.5
        note(self, scores)
        powers = scores.exp()
        return self.merge((powers @ value) / powers.sum(-1, keepdim=True))


@correct(68, 4)
class PowersOfTwo(SelfAttention):
    """2 to the scores over ln 2: the scale carries log₂ e."""

    def forward(self, x):
        query, key, value = self.project(x)
        scores = query @ key.transpose(-1, -2) * self.head_dim**-0.5
        note(self, scores)
        powers = torch.exp2(scores * 1.4426950408889634)
        return self.merge((powers / powers.sum(-1, keepdim=True)) @ value)


@correct(63, 3)
class WeightsReturned(Scores):
    """Weights that are also kept, averaged and logged: what people do to look at them."""

    def weights(self, scores):
        weights = scores.softmax(-1)
        self.last = weights.detach().mean(1)
        self.entropy = -(weights * (weights + 1e-9).log()).sum(-1).mean()
        return weights
