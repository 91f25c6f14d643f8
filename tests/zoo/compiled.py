"""Attention that Python no longer runs line by line: scripted, traced, compiled."""

import torch
from torch import Tensor, nn

from .bases import Block
from .entry import Expected, enter
from .products import AsPrinted


class Scriptable(nn.Module):
    """Plain enough for TorchScript."""

    def __init__(self, d_model: int, heads: int):
        super().__init__()
        self.heads = heads
        self.head_dim = d_model // heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d_model, d_model) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shape = [x.shape[0], x.shape[1], self.heads, self.head_dim]
        query = self.q_proj(x).view(shape).transpose(1, 2)
        key = self.k_proj(x).view(shape).transpose(1, 2)
        value = self.v_proj(x).view(shape).transpose(1, 2)
        scores = torch.matmul(query, key.transpose(2, 3)) / float(self.head_dim) ** 0.5
        return torch.matmul(torch.softmax(scores, dim=-1), value).transpose(1, 2).flatten(2)


def scripted():
    return Block(33, torch.jit.script(Scriptable(33, 3))), (torch.randn(2, 13, 33),)


def traced():
    x = torch.randn(2, 13, 51)
    return Block(51, torch.jit.trace(Scriptable(51, 3), x)), (x,)


def compiled():
    return torch.compile(Block(39, AsPrinted(39, 3)), backend="eager"), (torch.randn(2, 13, 39),)


def compiled_inside():
    return Block(57, torch.compile(AsPrinted(57, 3), backend="aot_eager")), (torch.randn(2, 13, 57),)


for make, head_dim in (scripted, 11), (traced, 17), (compiled, 13), (compiled_inside, 19):
    layers = {"attention": Expected(3, head_dim, head_dim**-0.5, 3)}
    enter(f"compiled.{make.__name__}", make, layers, statistics="none")
