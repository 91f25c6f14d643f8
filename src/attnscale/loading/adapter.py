"""Load PEFT adapters into their base models."""

from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from attnscale.errors import ModelError
from attnscale.loading.config import read_json, read_safe_json
from attnscale.loading.hub import is_name
from attnscale.loading.model_errors import as_model_error, quiet, require_package
from attnscale.loading.weights import read_weights

CONFIG = "adapter_config.json"
NAMES = ("adapter_model.safetensors", "adapter_model.bin")
# Fields that name other files or run code.
UNSAFE = {"auto_mapping", "megatron_config", "runtime_config", "loftq_config", "eva_config", "corda_config"}


def is_adapter(folder: Path) -> bool:
    """Return True for a folder with an adapter and without a model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> str:
    """Return the name of an adapter's base model; raise an error for a path."""
    config = read_json(folder / CONFIG)
    name = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(name, str) or not is_name(name):
        raise ModelError(
            f"The adapter {folder} names its base model as {name!r}, which is not a model's name. "
            "Give the base with --base, as a folder or as org/name."
        )
    return name


def apply_adapter(model: nn.Module, folder: Path) -> nn.Module:
    """Return the model with the adapter applied, and merged if its type supports merging."""
    require_package("peft", f"The adapter in {folder}", "peft")
    weights = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if weights is None:
        raise ModelError(f"Expected the weights of an adapter in {folder} as {NAMES[0]}, and there are none.")
    raw = read_safe_json(folder / CONFIG)
    with quiet(), as_model_error(f"put the adapter {folder} on its base"):
        peft: Any = import_module("peft")
        adapted: Any = peft.get_peft_model(model, _config_of(peft, raw, folder))
        found = peft.set_peft_model_state_dict(adapted, read_weights(weights))
        faults = [f"the base has no {name!r}" for name in found.unexpected_keys]
        faults += [f"{name!r} is missing" for name in found.missing_keys if "lora_" in name]
        if faults:
            raise ModelError(f"The adapter {folder} does not fit its base: {faults[0]}.")
        merged: nn.Module = adapted.merge_and_unload() if hasattr(adapted, "merge_and_unload") else adapted
        return merged


def _config_of(peft: Any, raw: Any, folder: Path) -> Any:
    kinds = {str(getattr(kind, "value", kind)): made for kind, made in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    kind = raw.get("peft_type") if isinstance(raw, dict) else None
    if kind not in kinds:
        raise ModelError(f"Unknown peft_type {kind!r} in {folder / CONFIG}: peft {peft.__version__} does not have it.")
    names = {field.name for field in fields(kinds[kind]) if field.init} - UNSAFE
    return kinds[kind](**{name: value for name, value in raw.items() if name in names} | {"inference_mode": True})
