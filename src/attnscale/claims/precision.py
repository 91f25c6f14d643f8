"""What low precision loses of attention under a scale: of its outputs about their mean, and of its gradients."""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

ROWS, KEYS, VALUE_DIM = 256, 256, 64
TOKENS = 16 * 1024  # that a mean loss is over: each output is pulled at by one of them
KINDS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Lost:
    """Shares: of what outputs say beyond their mean, the error; of the query gradients, those that became zero."""

    output: float
    gradients: float


@cache
def lost(scale: float, dim: int, kind: str) -> Lost:
    """Against float64 on the same rounded inputs."""
    rng = torch.Generator().manual_seed(0)
    shapes = ((ROWS, dim), (KEYS, dim), (KEYS, VALUE_DIM), (ROWS, VALUE_DIM))
    query, key, value, pull = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes)
    found = []
    for dtype in (torch.float64, KINDS[kind]):
        q, k, v, p = (x.to(KINDS[kind]).to(dtype) for x in (query, key, value, pull / TOKENS))
        output = F.scaled_dot_product_attention(q.requires_grad_(), k, v, scale=scale)
        gradient = torch.autograd.grad(output, q, p)[0]
        found.append((output.detach().double(), gradient.double()))
    (exact, slopes), (low, low_slopes) = found
    error = ((low - low.mean(0)) - (exact - exact.mean(0))).norm() / (exact - exact.mean(0)).norm()
    return Lost(error.item(), ((low_slopes == 0) & (slopes != 0)).double().mean().item())
