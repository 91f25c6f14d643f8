"""config.json, read as data: what could fetch or run code is taken out before transformers sees it."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from attnscale.errors import AttnscaleError, ModelError
from attnscale.files import read_whole

# An attention or experts implementation may name a kernel on a hub, which would be fetched and run; auto_map names
# Python files beside the weights; the rest name other repositories or files, or switch such loading on.
DISARMED = {
    "auto_map", "attn_implementation", "experts_implementation", "kernel_config", "use_kernels", "trust_remote_code",
    "custom_pipelines", "custom_generate", "name_or_path", "base_model_name_or_path", "transformers_weights",
    "fusion_config", "use_pretrained_backbone", "distributed_config",
}  # fmt: skip


# How many of a thing are built one by one, each taking time and memory before any weight is made. The deepest network
# that was published has 1,000 layers (arXiv:2203.00555), the most experts of one layer are 2,048 (arXiv:2101.03961).
COUNTED = re.compile(r"(^|_)(layers?|blocks?|depths?|stages?|experts|heads?)(_|$)")
MOST_COUNTED = 4096
DEEPEST = 64  # lists in lists: configurations nest three or four deep
MOST_BYTES = 2**27  # of JSON that comes with a model: an index of 100,000 tensors has a tenth of that


def read_config(path: Path, model_type: str | None = None) -> dict[str, Any]:
    """The configuration in that file, disarmed, with nothing in it that would take forever to build.

    One that names no `model_type`, as old ones, is taken as of the type given.
    """
    config = read_json(path)
    if not isinstance(config, dict):
        raise ModelError(f"Expected {path} to be a model's configuration with a 'model_type', and it is not.")
    if not isinstance(config.get("model_type"), str):
        if model_type is None:
            raise ModelError(
                f"Expected {path} to be a model's configuration with a 'model_type', and it has none: {_advice(config)}"
            )
        config["model_type"] = model_type
    elif model_type is not None and model_type != config["model_type"]:
        raise ModelError(f"{path} names its model_type, {config['model_type']!r}; leave --model-type out.")
    cleaned: dict[str, Any] = disarmed(config)
    require_modest(cleaned, path)
    return cleaned


def _advice(config: dict[str, Any]) -> str:
    """Which line is missing, by the classes that the configuration names."""
    kind = _named_type(config)
    shown, unsure = (kind, "") if kind else ("bert", " if it is a BERT, or whatever else it is")
    return f'add the line "model_type": "{shown}", to it, or give --model-type {shown}{unsure}.'


def _named_type(config: dict[str, Any]) -> str | None:
    """The type of the model whose class a configuration names.

    >>> _named_type({"architectures": ["GPT2LMHeadModel"]}), _named_type({"architectures": ["XLMRobertaModel"]})
    ('gpt2', 'xlm-roberta')
    """
    named = config.get("architectures")
    try:
        known = import_module("transformers.models.auto.modeling_auto")
    except ImportError:
        return None
    tables = [value for name, value in vars(known).items() if name.endswith("MAPPING_NAMES")]
    for name in named if isinstance(named, list) else []:
        kinds = {kind for table in tables for kind, made in table.items() if name == made or name in _listed(made)}
        if kinds:  # several types may share a class, which is called as one of them is
            return str(max(sorted(kinds), key=lambda kind: name.lower().startswith(re.sub("[-_]", "", kind))))
    return None


def _listed(made: Any) -> tuple[Any, ...]:
    return tuple(made) if isinstance(made, tuple | list) else ()


def require_modest(value: Any, path: Path, name: str = "") -> None:
    """Refuse counts of layers, heads and the like that no model has, before anything is built."""
    if isinstance(value, dict):
        for entry_name, entry in value.items():
            require_modest(entry, path, entry_name)
    elif isinstance(value, list):
        for entry in value:
            require_modest(entry, path, name)
    elif isinstance(value, int | float) and value > MOST_COUNTED and COUNTED.search(name):
        raise ModelError(f"Expected {name!r} of at most {MOST_COUNTED:,} in {path}, got {value:.4g}.")


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
        found = json.loads(read_whole(path, MOST_BYTES).decode("utf-8"))
    except OSError as error:
        raise ModelError(f"Could not read {path}: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise ModelError(f"Expected JSON in {path}, and it is not: not such text.") from None
    except json.JSONDecodeError as error:
        reason = f"line {error.lineno}, {error.msg}"
        raise ModelError(f"Expected JSON in {path}, and it is not: {reason}.") from None
    except AttnscaleError:
        raise
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits; lists in lists in lists
        raise ModelError(f"Could not read {path}: {str(error).partition(';')[0]}.") from None
    if _depth(found) > DEEPEST:
        raise ModelError(f"Expected at most {DEEPEST} lists or objects in one another in {path}, and there are more.")
    return found


def _depth(value: Any) -> int:
    """How many lists and objects lie in one another; level by level, since calling itself would end early."""
    level, depth = [value], 0
    while level := [entry for entry in level if isinstance(entry, dict | list)]:
        level = [inner for entry in level for inner in (entry.values() if isinstance(entry, dict) else entry)]
        depth += 1
    return depth
