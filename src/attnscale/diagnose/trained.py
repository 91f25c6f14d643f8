"""Decide from the parameters if a model has been trained.

Every common initialisation sets the gains of a norm to one value and its biases to zero, and one optimiser step changes
them. A model without norms is judged by the biases of its linear layers, which start at zero or uniform within
±1/√fan_in. Without either, the model counts as untrained, which is judged more strictly. If all parameters are sharded
and freed (FSDP1), none can be read, and the model counts as trained.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

UNIFORM_MEAN_SQUARE = 1 / 3  # mean square of U(−1, 1)
LARGEST_UNIFORM = 1.01  # bound of U(−1, 1) with rounding to bfloat16
UNIFORM_SLACK = 4.0  # tolerance in standard errors
UNIFORM_DEVIATION = (4 / 45) ** 0.5  # standard deviation of the square of U(−1, 1)


@torch.no_grad()
def is_trained(model: nn.Module) -> bool:
    """Return True if training has moved the norms of a model or, where it has none, the biases of its linear layers.

    >>> is_trained(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    False
    """
    norms = list(_norm_parameters(model))
    linears = [(each, each.bias) for each in model.modules() if isinstance(each, nn.Linear) and each.bias is not None]
    parameters = [
        (name, values) for name, tensor in norms if (values := _local(tensor)) is not None and values.dim() <= 1
    ]
    if parameters:
        return any(not _is_one_value(name, values) for name, values in parameters)
    biases = [(linear, values) for linear, bias in linears if (values := _local(bias)) is not None]
    if biases:
        return any(not _is_as_drawn(bias.double() * linear.in_features**0.5) for linear, bias in biases)
    return any(_is_freed(tensor) for _, tensor in (*norms, *linears))


def _norm_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield gains and biases of normalisation layers; FSDP1 makes them plain attributes of their module."""
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            attributes = {**vars(module), **dict(module.named_parameters(recurse=False))}
            yield from ((name, each) for name, each in attributes.items() if isinstance(each, Tensor))


def _is_one_value(name: str, values: Tensor) -> bool:
    """Return True for a constant gain of any value; a bias, or a single number, must be exactly 0 or 1."""
    first = values.flatten()[0]
    if not bool((values == first).all()):
        return False
    return float(first) in (0.0, 1.0) or (values.numel() > 1 and "bias" not in name)


def _local(parameter: Tensor) -> Tensor | None:
    """Return this rank's shard of a parameter; None if it is empty or its storage is freed."""
    shard: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return None if shard.is_meta or not shard.numel() or _is_freed(shard) else shard


def _is_freed(tensor: Tensor) -> bool:
    """Return True for a view of a storage that FSDP1 freed; reading it would crash the process."""
    if tensor.is_meta or not tensor.numel() or hasattr(tensor, "to_local"):
        return False
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return tensor.untyped_storage().nbytes() < needed


def _is_as_drawn(bias: Tensor) -> bool:
    """Return True if all values are zero, or look drawn from U(−1, 1) by their range and mean square."""
    if not bias.any():
        return True
    mean_square = float(bias.square().mean())
    error = UNIFORM_DEVIATION / bias.numel() ** 0.5
    return (
        float(bias.abs().max()) <= LARGEST_UNIFORM and abs(mean_square - UNIFORM_MEAN_SQUARE) <= UNIFORM_SLACK * error
    )
