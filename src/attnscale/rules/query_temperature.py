"""A learned temperature that depends on the query."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnscale.numerics import wide_dtype
from attnscale.rules.rule import Scaled, Visible, about, multiply, per_head


@about(
    formula="q·k / τ(q_i)",
    source="query-dependent temperature; Zhang et al. 2024, arXiv:2411.12892",
    use="letting each query choose between a sharp look-up and a broad average",
)
class QueryTemperature(nn.Module):
    """q·k / τ(q) with 1/τ(q) = softplus(w_h·q + b_h) / (ln 2 · √d_k), initially √d_k for every query.

    Softplus keeps τ positive, and makes 1/τ at most linear in the query.
    """

    def __init__(
        self, head_dim: int, heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, head_dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at τ = √d_k for every query."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, query: Tensor, key: Tensor, visible: Visible = None) -> Scaled:
        """Multiply each query by √d_k / τ(q); the kernel applies 1/√d_k."""
        wide = wide_dtype(query)
        projected = (query.to(wide) * per_head(self.weight.to(wide), query)).sum(-1, keepdim=True)
        sharpness = F.softplus(projected + per_head(self.bias.to(wide), query)) / math.log(2)
        return multiply(query, sharpness), key, 1 / math.sqrt(query.shape[-1])

    def extra_repr(self) -> str:
        """Return the sizes, for print(model)."""
        heads, head_dim = self.weight.shape
        return f"head_dim={head_dim}, heads={heads}"
