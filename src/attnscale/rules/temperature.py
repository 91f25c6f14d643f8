"""A fixed softmax temperature (Hinton et al. 2015)."""

from dataclasses import dataclass

from torch import Tensor

from attnscale.rules.rule import Scaled, Visible, about, require_positive


@about(
    formula="q·k / τ",
    source="Hinton et al. 2015, arXiv:1503.02531",
    use="sweeping sharpness by hand: τ below √d_k sharpens, above it softens",
)
@dataclass(frozen=True)
class temperature:
    """q·k / τ."""

    tau: float

    def __post_init__(self) -> None:
        require_positive("tau", self.tau)

    def __call__(self, query: Tensor, key: Tensor, visible: Visible = None) -> Scaled:
        """Scale by 1/τ."""
        return query, key, 1.0 / self.tau
