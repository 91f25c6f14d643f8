"""Whether a model is at its initialisation or has been trained, from its parameters alone.

Every common initialisation sets the gains of a norm to one value and its biases to zero, and one optimiser step moves
them. A model without norms is told by the biases of its linear layers, which start at zero or uniform within
±1/√fan_in. Where neither speaks, the model is taken to be at its initialisation, which is judged more strictly.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

UNIFORM_MEAN_SQUARE = 1 / 3  # of U(−1, 1)
LARGEST_UNIFORM = 1.01  # the bound, rounded to bfloat16
UNIFORM_SLACK = 4.0  # standard errors
UNIFORM_DEVIATION = (4 / 45) ** 0.5  # standard deviation of the square of U(−1, 1)


@torch.no_grad()
def is_trained(model: nn.Module) -> bool:
    """Whether training has moved the norms of a model, or, where it has none, the biases of its linear layers.

    >>> is_trained(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    False
    """
    norms = list(_norm_parameters(model))
    if norms:
        return any(not _is_one_value(name, values) for name, values in norms)
    return any(not _is_as_drawn(bias) for bias in _scaled_biases(model))


def _norm_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Gains and biases of LayerNorm, RMSNorm and their kin, known by their name and by being vectors."""
    for module in model.modules():
        if "norm" not in type(module).__name__.lower():
            continue
        for name, parameter in module.named_parameters(recurse=False):
            values = _here(parameter)
            if values.dim() <= 1 and values.numel() and not values.is_meta:
                yield name, values


def _is_one_value(name: str, values: Tensor) -> bool:
    """A gain is constant, whatever the constant; a bias, or a single number, must be exactly 0 or 1."""
    first = values.flatten()[0]
    if not bool((values == first).all()):
        return False
    return float(first) in (0.0, 1.0) or (values.numel() > 1 and "bias" not in name)


def _scaled_biases(model: nn.Module) -> Iterator[Tensor]:
    """Biases of linear layers in units of 1/√fan_in, within which nn.Linear draws them."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None and not module.bias.is_meta:
            bias = _here(module.bias)
            if bias.numel():
                yield bias.double() * module.in_features**0.5


def _here(parameter: Tensor) -> Tensor:
    """What this rank holds of it: ranks are not asked to meet for this."""
    shard: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return shard


def _is_as_drawn(bias: Tensor) -> bool:
    """All zero, or uniform within ±1: none outside, and the mean square that of a uniform draw of this size."""
    if not bias.any():
        return True
    mean_square = float(bias.square().mean())
    error = UNIFORM_DEVIATION / bias.numel() ** 0.5
    return (
        float(bias.abs().max()) <= LARGEST_UNIFORM and abs(mean_square - UNIFORM_MEAN_SQUARE) <= UNIFORM_SLACK * error
    )
