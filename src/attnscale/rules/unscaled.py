"""No scale, as in T5, which folds the scale into the initialisation (Raffel et al. 2020)."""

from torch import Tensor

from attnscale.rules.rule import Scaled, Visible, about


@about(
    formula="q·k",
    source="T5: Raffel et al. 2020, arXiv:1910.10683",
    use="the scale is already in the weights or in normalised q and k; otherwise the spread is √d_k",
)
def unscaled(query: Tensor, key: Tensor, visible: Visible = None) -> Scaled:
    """q·k."""
    return query, key, 1.0
