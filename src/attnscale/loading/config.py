"""Read config.json as data; remove fields that could fetch or run code before transformers reads it."""

import json
import re
from pathlib import Path
from typing import Any

from attnscale.errors import ModelError
from attnscale.files import read_whole

# An attention or experts implementation may name a kernel on a hub, which would be fetched and run. auto_map names
# Python files next to the weights. The other fields name repositories or files, or enable remote code.
UNSAFE = {
    "auto_map", "attn_implementation", "experts_implementation", "kernel_config", "use_kernels", "trust_remote_code",
    "custom_pipelines", "custom_generate", "name_or_path", "base_model_name_or_path", "transformers_weights",
    "fusion_config", "use_pretrained_backbone", "distributed_config",
}  # fmt: skip

# Counts of parts, which are built in a loop before any weight. The deepest published network has 1,000 layers
# (arXiv:2203.00555), the largest number of experts in a layer is 2,048 (arXiv:2101.03961).
COUNTED = re.compile(r"(^|_)(layers?|blocks?|depths?|stages?|experts|heads?)(_|$)")
MAX_COUNT = 4096
MAX_DEPTH = 100  # nesting of lists and objects
MAX_BYTES = 2**27  # size of a model's JSON file; ten times an index of 100,000 tensors


def read_config(path: Path, model_type: str | None = None) -> dict[str, Any]:
    """Read a model's configuration without unsafe fields; `model_type` replaces a missing one."""
    config = read_safe_json(path)
    if not isinstance(config, dict):
        raise ModelError(f"Expected the configuration of a model in {path}, an object with a 'model_type'.")
    if not isinstance(config.get("model_type"), str):
        if model_type is None:
            raise ModelError(
                f'Expected a \'model_type\' in {path}, and there is none. Add one, such as "model_type": "bert", '
                "or give --model-type."
            )
        config["model_type"] = model_type
    elif model_type is not None and model_type != config["model_type"]:
        raise ModelError(f"{path} has the model_type {config['model_type']!r}; leave --model-type out.")
    return config


def read_safe_json(path: Path) -> Any:
    """Read the JSON of a configuration; remove unsafe fields, and raise an error for impossible counts."""
    try:
        return safe(read_json(path), path)
    except RecursionError:
        raise ModelError(f"Could not read {path}: its lists and objects are nested too deeply.") from None


def safe(value: Any, path: Path, name: str = "", depth: int = 0) -> Any:
    """Remove unsafe and private fields at every level; raise an error for impossible numbers of layers or heads."""
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, dict):
        return {
            each: safe(entry, path, each, depth + 1)
            for each, entry in value.items()
            if each not in UNSAFE and not each.startswith("_")
        }
    if isinstance(value, list):
        return [safe(entry, path, name, depth + 1) for entry in value]
    if isinstance(value, int | float) and value > MAX_COUNT and COUNTED.search(name):
        raise ModelError(f"Expected {name!r} of at most {MAX_COUNT:,} in {path}, got {value:.4g}.")
    return value


def read_json(path: Path) -> Any:
    """Read the JSON in a file."""
    try:
        content = read_whole(path, MAX_BYTES)
    except OSError as error:
        raise ModelError(f"Could not read {path}: {error.strerror or error}.") from None
    try:
        return json.loads(content.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise ModelError(f"Expected JSON in {path}, but line {error.lineno} is not: {error.msg}.") from None
    except (ValueError, RecursionError) as error:  # not UTF-8; numbers of thousands of digits; lists in lists in lists
        raise ModelError(f"Expected JSON in {path}, but it cannot be read: {str(error).partition(';')[0]}.") from None
