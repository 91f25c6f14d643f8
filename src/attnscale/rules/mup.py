"""muP's attention scale: q·k of aligned q and k grows as d_k, not √d_k (Tensor Programs V)."""

import math
from dataclasses import dataclass

from torch import Tensor

from attnscale.rules.rule import Scaled, Visible, about, require_positive

MUP_BASE = 64  # the head dimension at which √base / d_k equals 1/√d_k: the 8/d_k of the mup package


@about(
    formula="q·k · √base / d_k",
    source="muP: Yang et al. 2022, arXiv:2203.03466",
    use="transferring hyperparameters from one width to another; equals inverse_sqrt at d_k = base",
)
@dataclass(frozen=True)
class mup:
    """q·k · √base / d_k."""

    base: float = MUP_BASE

    def __post_init__(self) -> None:
        require_positive("base", self.base)

    def __call__(self, query: Tensor, key: Tensor, visible: Visible = None) -> Scaled:
        """Scale by √base / d_k."""
        return query, key, math.sqrt(self.base) / query.shape[-1]
