"""Parameters that are scaled: the local part of a sharded one, and checks that it may be changed."""

from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from attnscale.errors import InputError, SettingError
from attnscale.torch_internals import local_part, shard_offset

Frozen = Literal["keep", "write"]
PARAMETRIZED = ("parametrizations.", "_orig")  # part of the name, and the suffix used by torch's older functions


def check_frozen(frozen: str) -> None:
    """Raise SettingError unless `frozen` is 'keep' or 'write'."""
    if frozen not in get_args(Frozen):
        raise SettingError(f"Expected frozen as 'keep' or 'write', got {frozen!r}.")


def refuse_foreign_parameters(model: nn.Module) -> None:
    """Refuse FSDP1 and DeepSpeed, which store parameters elsewhere: changes would be lost or affect other weights."""
    for module in model.modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise SettingError(
                "FSDP1 keeps parameters flattened, and their rows cannot be scaled; use FSDP2, "
                "torch.distributed.fsdp.fully_shard."
            )
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_fsdp_flattened", False):
            raise SettingError(f"{name} is a part of FSDP1's flattened parameters, and its rows cannot be scaled.")
        if hasattr(parameter, "ds_id") or getattr(parameter, "_hp_mapping", None) is not None:
            raise SettingError(
                f"{name} is a copy that DeepSpeed rebuilds from its own partitions at each step, which would undo "
                "a clip; train with DDP or FSDP2 to clip."
            )


def refuse_copies(model: nn.Module, optimizer: object) -> None:
    """Refuse an optimiser without any of the model's parameters: it updates copies and would undo all changes."""
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(optimizer, Optimizer) and not isinstance(groups, list):
        return
    held = {id(parameter) for group in groups or () for parameter in group["params"]}
    if held and not any(id(parameter) in held for parameter in model.parameters()):
        raise SettingError(
            f"Expected an optimiser of the model's own parameters, got {type(optimizer).__name__}, which holds none of "
            "them: its copies, in float32 or in partitions, would undo every clip at its next step."
        )


def inner_optimizer(optimizer: object) -> Optimizer:
    """Return the optimiser inside wrappers without hooks, such as accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return inner_optimizer(inner)
    if not isinstance(optimizer, Optimizer):
        raise SettingError(
            f"Expected a torch.optim.Optimizer to attach to, got {type(optimizer).__name__}; call step() after its own."
        )
    return optimizer


def why_not_written(name: str, parameter: Tensor, frozen: Frozen) -> str | None:
    """Return why a parameter must not be changed; None if it may be."""
    if not parameter.is_floating_point():
        return f"{name} is quantised, {parameter.dtype}"
    if not parameter.numel():
        return f"{name} is empty on this rank"
    if PARAMETRIZED[0] in name or name.endswith(PARAMETRIZED[1]):
        return f"{name} is parametrised, so the weight computed from it may not scale with it"
    if frozen == "keep" and not parameter.requires_grad:
        return f"{name} is frozen; pass frozen='write' to change it too"
    return None


def held_rows(
    parameter: Tensor, shape: tuple[int, ...], across: tuple[int, ...]
) -> tuple[Tensor, NDArray[np.int64]] | None:
    """Return the local part of a parameter that was watched with this shape, and the number of each of its rows.

    The number is −1 for rows outside the watched part. The numbers have the shape of the local part, with size 1 along
    the axes `across`.
    """
    found = part_with_shape(parameter, shape)
    if found is None:
        return None
    whole, begins = found
    local, start = _local(whole)
    numbers = np.zeros((1,) * local.dim(), dtype=np.int64)
    outside = np.zeros_like(numbers, dtype=bool)
    for axis in (axis for axis in range(local.dim()) if axis not in across):
        at = np.arange(local.shape[axis]) + start[axis] - begins[axis]
        at = at.reshape([-1 if each == axis else 1 for each in range(local.dim())])
        numbers, outside = numbers * shape[axis] + at, outside | (at < 0) | (at >= shape[axis])
    return local, np.where(outside, -1, numbers)


def _local(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the local part of a parameter, and its offset in the whole parameter."""
    if not is_sharded(parameter):
        return parameter.detach(), (0,) * parameter.dim()
    found = shard_offset(parameter.shape, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    if found is None:
        raise InputError(f"torch {torch.__version__} does not say which part of a sharded parameter this rank has.")
    _, start = found
    return parameter.to_local().detach(), tuple(start)  # type: ignore[attr-defined]


def part_with_shape(parameter: Tensor | None, shape: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]] | None:
    """Return the parameter or its local part, depending on which has the watched shape, and the offset of that shape.

    If heads are distributed and each part is sharded again (FSDP2 with tensor parallel), the last axis of torch's mesh
    distributes heads.
    """
    nowhere = (0,) * len(shape)
    if parameter is None or tuple(parameter.shape) == shape:
        return None if parameter is None else (parameter, nowhere)
    local = local_part(parameter)
    if local is None:
        return None
    mesh, placement = parameter.device_mesh, parameter.placements[-1]  # type: ignore[attr-defined]
    if mesh.ndim == 1:
        return (local, nowhere) if tuple(local.shape) == shape else None
    if placement.is_replicate():
        return None
    size, axis = -(-parameter.shape[placement.dim] // mesh.size(mesh.ndim - 1)), placement.dim
    first = mesh.get_coordinate()[-1] * size
    cut = [*parameter.shape]
    cut[axis] = max(0, min(size, cut[axis] - first))
    return (parameter, (*nowhere[:axis], first, *nowhere[axis + 1 :])) if tuple(cut) == shape else None


def is_sharded(parameter: Tensor) -> bool:
    """Return True if a parameter is a DTensor, as with FSDP2."""
    return hasattr(parameter, "device_mesh") and hasattr(parameter, "placements")
