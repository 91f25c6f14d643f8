"""One learned temperature for each head."""

import math

import torch
from torch import Tensor, nn

from attnscale.numerics import wide_dtype
from attnscale.rules.rule import Scaled, Visible, about, multiply, per_head


@about(
    formula="q·k / τ_h",
    source="learned temperature; per head as in Swin-v2, arXiv:2111.09883",
    use="letting each head find its own sharpness",
)
class LearnedTemperature(nn.Module):
    """q·k / τ_h with a learned, positive τ_h = √d_k · e^θ_h, initially √d_k."""

    def __init__(
        self, heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at τ = √d_k."""
        nn.init.zeros_(self.log_temperature)

    def forward(self, query: Tensor, key: Tensor, visible: Visible = None) -> Scaled:
        """Divide the query by e^θ_h; the kernel applies 1/√d_k."""
        factor = torch.exp(-self.log_temperature.to(wide_dtype(query)))
        return multiply(query, per_head(factor, query)), key, 1 / math.sqrt(query.shape[-1])

    def extra_repr(self) -> str:
        """Return the number of heads, for print(model)."""
        return f"heads={self.log_temperature.shape[0]}"
