"""Parameters: which part of one this rank holds, and whether it may be written."""

from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from attnscale.errors import InputError, SettingError
from attnscale.torch_internals import local_part, shard_offset

Frozen = Literal["keep", "write"]
PARAMETRIZED = ("parametrizations.", "_orig")  # in the name, and behind it: of torch's older functions


def check_frozen(frozen: str) -> None:
    """Refuse a setting that is none."""
    if frozen not in get_args(Frozen):
        raise SettingError(f"Expected frozen as 'keep' or 'write', got {frozen!r}.")


def refuse_foreign_parameters(model: nn.Module) -> None:
    """Refuse a model whose parameters are kept elsewhere, so that a change of them is lost or hits other weights."""
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
                f"{name} is a copy that DeepSpeed makes anew at each step from partitions of its own, so scaling it "
                "would be undone; train with DDP or FSDP2 to clip."
            )


def refuse_copies(model: nn.Module, optimizer: object) -> None:
    """Refuse an optimiser that holds none of the model's parameters: it holds copies, which undo what is written."""
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
    """Return the optimiser inside wrappers that pass steps on to it, as accelerate's does, and take no hooks."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return inner_optimizer(inner)
    if not isinstance(optimizer, Optimizer):
        raise SettingError(
            f"Expected a torch.optim.Optimizer to attach to, got {type(optimizer).__name__}; call step() after its own."
        )
    return optimizer


def why_not_written(name: str, parameter: Tensor, frozen: Frozen) -> str | None:
    """Return why a parameter is not written; None where it is."""
    if not parameter.is_floating_point():
        return f"{name} is quantised, {parameter.dtype}"
    if not parameter.numel():
        return f"{name} is empty on this rank"
    if PARAMETRIZED[0] in name or name.endswith(PARAMETRIZED[1]):
        return f"{name} is parametrised, and what is made of it may not follow when it is scaled"
    if frozen == "keep" and not parameter.requires_grad:
        return f"{name} is frozen; frozen='write' writes it too"
    return None


def held_rows(
    parameter: Tensor, shape: tuple[int, ...], across: tuple[int, ...]
) -> tuple[Tensor, NDArray[np.int64]] | None:
    """Return what this rank holds of a parameter that was watched with this shape, and the number of each row in that.

    −1 for rows of another part; the numbers have the shape of what is held, and 1 for the axes that rows run along.
    """
    found = held_as(parameter, shape)
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
    """Return the part of a parameter that this rank holds, and where in the whole it begins."""
    if not is_sharded(parameter):
        return parameter.detach(), (0,) * parameter.dim()
    found = shard_offset(parameter.shape, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    if found is None:
        raise InputError(f"torch {torch.__version__} does not tell which part of a sharded parameter a rank holds.")
    _, start = found
    return parameter.to_local().detach(), tuple(start)  # type: ignore[attr-defined]


def held_as(parameter: Tensor | None, shape: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]] | None:
    """Return the parameter or this rank's part of it, whichever was watched with this shape, and where that begins.

    Where heads are shared out and each part is sharded again (FSDP2 and tensor parallel), the last axis of the mesh
    cuts heads, as torch lays them out.
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
    """Return True if a parameter is spread over ranks, as FSDP2's are."""
    return hasattr(parameter, "device_mesh") and hasattr(parameter, "placements")
