"""Scaled dot-product attention (Vaswani et al. 2017)."""

from torch import Tensor

from attnscale.rules.rule import Scaled, Visible, about


@about(
    formula="q·k / √d_k",
    source="Vaswani et al. 2017, arXiv:1706.03762",
    use="the default: unit spread when q and k have independent, unit-variance components",
)
def inverse_sqrt(query: Tensor, key: Tensor, visible: Visible = None) -> Scaled:
    """q·k / √d_k."""
    return query, key, query.shape[-1] ** -0.5
