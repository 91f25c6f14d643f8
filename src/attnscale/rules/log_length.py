"""Scalable softmax: the scale grows with the number of visible keys (SSMax, Nakanishi 2025)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnscale.numerics import wide_dtype
from attnscale.rules.rule import Scaled, Visible, about, multiply, require_positive
from attnscale.shapes import broadcasts_to

SSMAX_S = 0.43  # the paper's value for s that is not learned (figure 1)


@about(
    formula="s · ln n · q·k / √d_k",
    source="SSMax: Nakanishi 2025, arXiv:2501.19399",
    use="lengths that vary or grow after training; n is the number of keys the row sees",
    needs_visible=True,
)
@dataclass(frozen=True)
class log_length:
    """s · ln n · q·k / √d_k, n = visible keys of the row."""

    s: float = SSMAX_S

    def __post_init__(self) -> None:
        require_positive("s", self.s)

    def __call__(self, query: Tensor, key: Tensor, visible: Visible = None) -> Scaled:
        """Scale by s ln n / √d_k: by one float if every row sees all keys, else by scaling the query."""
        inverse_sqrt = query.shape[-1] ** -0.5
        if isinstance(visible, Tensor):
            counts = visible.to(wide_dtype(query)).clamp(min=1)  # keep rows without visible keys finite
            factor = self.s * counts.log()
            is_row = broadcasts_to(factor.shape, query.shape[:-1])  # else a column, (…, q_len, 1)
            return multiply(query, factor.unsqueeze(-1) if is_row else factor), key, inverse_sqrt
        keys = key.shape[-2] if visible is None else visible
        if torch.compiler.is_compiling():  # a float would fix the length in the graph
            factor = self.s * torch.full((), keys, dtype=wide_dtype(query), device=query.device).clamp(min=1).log()
            return multiply(query, factor), key, inverse_sqrt
        return query, key, self.s * math.log(max(keys, 1)) * inverse_sqrt
