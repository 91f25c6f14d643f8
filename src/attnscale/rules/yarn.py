"""YaRN's attention temperature for a context stretched by a factor (Peng et al. 2023)."""

import math
from dataclasses import dataclass

from torch import Tensor

from attnscale.errors import SettingError
from attnscale.rules.rule import Scaled, Visible, about

SLOPE = 0.1  # the fit of Peng et al.: √(1/t) = 0.1 ln s + 1


@about(
    formula="(0.1 ln factor + 1)² · q·k / √d_k",
    source="YaRN: Peng et al. 2023, arXiv:2309.00071",
    use="a rotary model whose context was stretched by this factor",
)
@dataclass(frozen=True)
class yarn:
    """(0.1 ln factor + 1)² · q·k / √d_k."""

    factor: float

    def __post_init__(self) -> None:
        if not (isinstance(self.factor, (int, float)) and 1 <= self.factor < math.inf):
            raise SettingError(
                f"Expected a finite factor of 1 or more (new context over trained context), got {self.factor!r}."
            )

    def __call__(self, query: Tensor, key: Tensor, visible: Visible = None) -> Scaled:
        """Scale by √(1/t)² / √d_k, with √(1/t) = 0.1 ln factor + 1."""
        return query, key, sharpening(self.factor) * query.shape[-1] ** -0.5


def sharpening(stretch: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor on the scores of a stretched context, (0.1 m ln s + 1)², with a model's own m."""
    return (SLOPE * mscale * math.log(stretch) + 1.0) ** 2
