"""PEFT adapters: the base they were trained on, with their weights put into it."""

from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from attnscale.errors import ModelError
from attnscale.loading.cache import is_name
from attnscale.loading.config import disarmed, read_json, require_modest
from attnscale.loading.huggingface import quiet
from attnscale.loading.telling import telling
from attnscale.loading.weights import read_weights

CONFIG = "adapter_config.json"
NAMES = ("adapter_model.safetensors", "adapter_model.bin")
RUNS = {"auto_mapping", "megatron_config", "runtime_config", "loftq_config", "eva_config", "corda_config"}


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, and not a model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> str:
    """The name of the model that an adapter was trained on; a path in it is not followed."""
    given = read_json(folder / CONFIG)
    name = given.get("base_model_name_or_path") if isinstance(given, dict) else None
    if not isinstance(name, str) or not is_name(name):
        raise ModelError(
            f"Expected the base of the adapter {folder} as --base FOLDER or org/name: its {CONFIG} names {name!r}, "
            "which is no model's name."
        )
    return name


def put_on(model: nn.Module, folder: Path) -> nn.Module:
    """The base with the adapter's weights, merged into it where its kind can be."""
    if find_spec("peft") is None:
        raise ModelError(f"The adapter in {folder} needs the package peft: pip install peft.")
    weights = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if weights is None:
        raise ModelError(f"Expected the adapter's weights in {folder} as {NAMES[0]}, and there are none.")
    raw = disarmed(read_json(folder / CONFIG))
    require_modest(raw, folder / CONFIG)
    with quiet(), telling(f"put the adapter {folder} on its base"):
        peft: Any = import_module("peft")
        config = _config(peft, raw, folder)
        adapted: Any = peft.get_peft_model(model, config)
        found = peft.set_peft_model_state_dict(adapted, read_weights(weights))
        if found.unexpected_keys:
            raise ModelError(f"The adapter {folder} does not fit its base: no {found.unexpected_keys[0]!r} there.")
        missing = [name for name in found.missing_keys if "lora_" in name]
        if missing:
            raise ModelError(f"The adapter {folder} does not fit its base: {missing[0]!r} is missing.")
        merged: nn.Module = adapted.merge_and_unload() if hasattr(adapted, "merge_and_unload") else adapted
        return merged


def _config(peft: Any, raw: Any, folder: Path) -> Any:
    kinds = {str(getattr(kind, "value", kind)): make for kind, make in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    kind = raw.get("peft_type") if isinstance(raw, dict) else None
    if kind not in kinds:
        raise ModelError(f"Unknown peft_type {kind!r} in {folder / CONFIG}: peft {peft.__version__} has none such.")
    known = {field.name for field in fields(kinds[kind]) if field.init} - RUNS
    return kinds[kind](**{name: value for name, value in raw.items() if name in known} | {"inference_mode": True})
