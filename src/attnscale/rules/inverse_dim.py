"""Division by d_k itself, the other divisor that articles discuss."""

from torch import Tensor

from attnscale.rules.rule import Scaled, Visible, about


@about(
    formula="q·k / d_k",
    source="the usual question, why not d_k? muP keeps the 1/d_k and multiplies it by √base",
    use="showing what too large a divisor does: the spread starts at 1/√d_k and attention is nearly uniform",
)
def inverse_dim(query: Tensor, key: Tensor, visible: Visible = None) -> Scaled:
    """Scale by 1/d_k."""
    return query, key, 1.0 / query.shape[-1]
