"""Shares: how the gradient on the queries is shared out among them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnscale.lab.tasks import Batch
from attnscale.models.transformer import CausalSelfAttention

POINTS = 20  # parts of a curve of shares


@dataclass(frozen=True)
class Shares:
    """The gradient on queries, by its length at each: how large, and how even."""

    root_mean_square: float
    median: float
    curve: tuple[float, ...]  # what the quietest 0%, 5%, …, 100% of the queries receive, as a share of all

    @property
    def evenness(self) -> float:
        """The median query's gradient, of the root mean square: 1 if all are alike, 0 if most receive nothing."""
        return self.median / self.root_mean_square if self.root_mean_square else 0.0

    @property
    def quiet_half(self) -> float:
        """The share of the half that receives least; an even half would receive 0.5."""
        return self.curve[POINTS // 2]

    @property
    def loud_tenth(self) -> float:
        """The share of the tenth that receives most; an even tenth would receive 0.1."""
        return 1 - self.curve[POINTS - POINTS // 10]


def along() -> list[float]:
    """The shares of queries at which a curve is told, quietest first."""
    return [point / POINTS for point in range(POINTS + 1)]


def shares(sizes: Tensor) -> Shares:
    """Of gradients of these lengths.

    >>> shares(torch.ones(40)).quiet_half, shares(torch.tensor([0.0] * 39 + [1.0])).loud_tenth
    (0.5, 1.0)
    """
    sizes = sizes.detach().double().flatten()
    summed = torch.cat([sizes.new_zeros(1), sizes.sort().values.cumsum(0)])
    at = torch.linspace(0, len(sizes), POINTS + 1, dtype=torch.float64)
    below, above = at.floor().long(), at.ceil().long()
    curve = torch.lerp(summed[below], summed[above], at - below) / summed[-1].clamp(min=torch.finfo(torch.float64).tiny)
    return Shares(sizes.square().mean().sqrt().item(), sizes.median().item(), tuple(curve.tolist()))


def mean_shares(every: Sequence[Shares]) -> Shares:
    """The mean over layers, each counted alike."""
    count = len(every)
    return Shares(
        sum(one.root_mean_square for one in every) / count,
        sum(one.median for one in every) / count,
        tuple(sum(points) / count for points in zip(*(one.curve for one in every), strict=True)),
    )


def query_shares(model: nn.Module, batch: Batch) -> list[Shares]:
    """Of the loss on a batch, layer by layer of a model of the lab; its parameters keep the gradients they had."""
    attentions = [module for module in model.modules() if isinstance(module, CausalSelfAttention)]
    queries: list[Tensor] = []
    hooks = [
        attention.query.register_forward_hook(lambda module, args, output: queries.append(output))
        for attention in attentions
    ]
    try:
        loss = batch.loss(model)
    finally:
        for hook in hooks:
            hook.remove()
    found = torch.autograd.grad(loss, queries)
    return [
        shares(gradient.unflatten(-1, (attention.heads, attention.head_dim)).norm(dim=-1))
        for gradient, attention in zip(found, attentions, strict=True)
    ]
