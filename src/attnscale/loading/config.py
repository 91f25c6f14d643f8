"""config.json, read as data: what could fetch or run code is taken out before transformers sees it."""

import json
from pathlib import Path
from typing import Any

from attnscale.errors import ModelError

# An attention or experts implementation may name a kernel on a hub, which would be fetched and run; auto_map names
# Python files beside the weights; the rest name other repositories or files, or switch such loading on.
DISARMED = {
    "auto_map", "attn_implementation", "experts_implementation", "kernel_config", "use_kernels", "trust_remote_code",
    "custom_pipelines", "custom_generate", "name_or_path", "base_model_name_or_path", "transformers_weights",
    "fusion_config", "use_pretrained_backbone", "distributed_config",
}  # fmt: skip


def read_config(path: Path) -> dict[str, Any]:
    """The configuration in that file, disarmed."""
    config = read_json(path)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"Expected {path} to be a model's configuration with a 'model_type', and it is not.")
    cleaned: dict[str, Any] = disarmed(config)
    return cleaned


def disarmed(value: Any) -> Any:
    """The same without the fields that could fetch or run anything, nested ones included; private fields go too."""
    if isinstance(value, dict):
        return {
            name: disarmed(entry) for name, entry in value.items() if name not in DISARMED and not name.startswith("_")
        }
    return [disarmed(entry) for entry in value] if isinstance(value, list) else value


def read_json(path: Path) -> Any:
    """The JSON in a file, or one sentence on why there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"Could not read {path}: {error.strerror or error}.") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        reason = f"line {error.lineno}, {error.msg}" if isinstance(error, json.JSONDecodeError) else "not such text"
        raise ModelError(f"Expected JSON in {path}, and it is not: {reason}.") from None
