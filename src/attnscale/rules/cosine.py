"""Scaled cosine attention (Swin-v2, Liu et al. 2021)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnscale.numerics import wide_dtype
from attnscale.rules.rule import Scaled, Visible, about, multiply, per_head

START = 10.0  # initial 1/τ of Swin-v2
CAP = 100.0  # largest 1/τ of Swin-v2


@about(
    formula="cos(q, k) / τ_h",
    source="Swin-v2: Liu et al. 2021, arXiv:2111.09883",
    use="scores that must stay bounded: never above 1/τ ≤ 100",
)
class Cosine(nn.Module):
    """cos(q, k) / τ_h, with 1/τ_h learned: initially 10, at most 100."""

    def __init__(
        self, heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.log_inverse_temperature = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at 1/τ = 10."""
        nn.init.constant_(self.log_inverse_temperature, math.log(START))

    def forward(self, query: Tensor, key: Tensor, visible: Visible = None) -> Scaled:
        """Normalise both and multiply the query by 1/τ_h."""
        wide = wide_dtype(query)
        inverse_temperature = torch.exp(self.log_inverse_temperature.to(wide).clamp(max=math.log(CAP)))
        direction = F.normalize(key.to(wide), dim=-1).to(key.dtype)
        return self._scaled_direction(query, inverse_temperature), direction, 1.0

    def _scaled_direction(self, query: Tensor, inverse_temperature: Tensor) -> Tensor:
        direction = F.normalize(query.to(inverse_temperature.dtype), dim=-1)
        return multiply(direction, per_head(inverse_temperature, query)).to(query.dtype)

    def extra_repr(self) -> str:
        """Return the number of heads, for print(model)."""
        return f"heads={self.log_inverse_temperature.shape[0]}"
