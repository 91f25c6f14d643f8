"""A multiplier chosen by hand, such as Granite's attention_multiplier."""

import math
from dataclasses import dataclass

from torch import Tensor

from attnscale.errors import SettingError
from attnscale.rules.rule import Scaled, Visible, about


@about(
    formula="value · q·k",
    source="e.g. attention_multiplier in Granite, query_pre_attn_scalar in Gemma-2",
    use="reproducing a model that states its own multiplier",
)
@dataclass(frozen=True)
class constant:
    """value · q·k."""

    value: float

    def __post_init__(self) -> None:
        if not (isinstance(self.value, (int, float)) and math.isfinite(self.value)):
            raise SettingError(f"Expected a finite number as the constant scale, got {self.value!r}.")

    def __call__(self, query: Tensor, key: Tensor, visible: Visible = None) -> Scaled:
        """Scale by the value."""
        return query, key, float(self.value)
