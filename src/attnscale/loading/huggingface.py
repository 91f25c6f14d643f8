"""A Hugging Face model from a folder or a config.json: transformers' own classes only, on a disarmed configuration."""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnscale.errors import ModelError
from attnscale.loading.config import read_config
from attnscale.loading.loaded import Request
from attnscale.loading.memory import fits, require_room
from attnscale.loading.streaming import can_stream, streamed
from attnscale.loading.telling import telling
from attnscale.loading.weights import find_weights, read_weights, size_of

IN_A_LAYER = re.compile(r"\.\d+\.")  # encoder.layer.3.…: the trunk, not a head on top of it
RECOMPUTED = ("position_ids", "inv_freq", "masked_bias", "attn.bias")  # buffers that older checkpoints carry along


def load_huggingface(config_path: Path, weights_path: Path | None, request: Request) -> nn.Module:
    """The model that a config.json describes, with those weights, or at random initialisation without any."""
    raw = read_config(config_path, request.model_type)
    quantised = raw.pop("quantization_config", None)
    if quantised is not None and weights_path is not None:
        raise ModelError(
            f"The weights of {config_path.parent} are quantised, which is not supported; or --random-init."
        )
    transformers = transformers_package()
    if raw["model_type"] not in transformers.CONFIG_MAPPING:
        raise ModelError(
            f"Unknown model_type {raw['model_type']!r} in {config_path}: transformers {transformers.__version__} "
            "has no such model, and code that comes with a model is never run."
        )
    with quiet(), telling(f"build a {raw['model_type']} model from {config_path}"):
        config = transformers.CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
        make = _class_of(config)
        if weights_path is None:
            config.dtype = torch.float32
        is_streamed = weights_path is not None and _is_streamed(make, config, weights_path, request)
        if not is_streamed:
            require_room_for(make, config, request)
        if weights_path is None:
            model: nn.Module = make(config)
            return model
    request.report("reading weights")
    with quiet(), telling(f"load the weights {weights_path}"):
        if is_streamed:
            return streamed(make, config, weights_path)
        require_room(size_of(weights_path), request.device)
        return fitted(make, config, read_weights(weights_path), weights_path)


def _is_streamed(make: Any, config: Any, weights: Path, request: Request) -> bool:
    """Whether the model does not fit as a whole, and its files can be read in parts."""
    if not can_stream(weights, request.device):
        return False
    return not fits(size_of_model(make, config), request.device) or not fits(size_of(weights), request.device)


def weights_beside(folder: Path) -> Path | None:
    """The weights of a folder that holds a config.json; a folder without one holds no model."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"Expected a config.json in {folder}, and there is none: no model to check.")
    return find_weights(folder)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and reports, where it is in use, off the screen: what matters is told."""
    if "transformers" not in sys.modules:
        yield
        return
    logging: Any = import_module("transformers.utils.logging")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def transformers_package() -> Any:
    """Transformers, or one sentence on how to get it."""
    try:
        return import_module("transformers")
    except ImportError:
        raise ModelError("A Hugging Face model needs the package transformers: pip install 'attnscale[hf]'.") from None


def _class_of(config: Any) -> Any:
    """The class that the configuration names, if it is transformers' own and made for it; else the bare model."""
    transformers = transformers_package()
    named = config.architectures if isinstance(config.architectures, list) else []
    for name in named:
        found: Any = getattr(transformers, str(name), None)
        is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
        if is_model and found.config_class is type(config):
            return found
    found = transformers.MODEL_MAPPING[type(config)]
    return found[0] if isinstance(found, tuple | list) else found


def require_room_for(make: Any, config: Any, request: Request) -> Any:
    """A sketch of the model, which has shapes and no numbers; one that its configuration makes too large is refused."""
    sketch = _sketch(make, config)
    require_room(_size(sketch, config), request.device)
    return sketch


def size_of_model(make: Any, config: Any) -> int:
    """Bytes of its parameters and buffers."""
    return _size(_sketch(make, config), config)


def _sketch(make: Any, config: Any) -> Any:
    with torch.device("meta"):
        return make(deepcopy(config))


def _size(sketch: Any, config: Any) -> int:
    tensors: Iterable[Tensor] = [*sketch.parameters(), *sketch.buffers()]
    itemsize = config.dtype.itemsize if isinstance(config.dtype, torch.dtype) else torch.float16.itemsize
    return sum(tensor.numel() for tensor in tensors) * itemsize


def fitted(make: Any, config: Any, weights: dict[str, Tensor], path: Path) -> nn.Module:
    """The model of a class with these weights; what does not fit is told."""
    # From the tensors, never from the folder: nothing else in it is looked at.
    model: nn.Module
    model, info = make.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype="auto",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        local_files_only=True,
        trust_remote_code=False,
        use_kernels=False,
    )
    prefix = f"{make.base_model_prefix}."
    has_head = any(name.startswith(prefix) for name in model.state_dict())
    wrong = sorted(info["mismatched_keys"])
    missing = sorted(name for name in info["missing_keys"] if not _beside_the_trunk(name, prefix if has_head else ""))
    extra = sorted(name for name in info["unexpected_keys"] if IN_A_LAYER.search(name) and not _recomputed(name))
    if wrong:
        name, found, expected = wrong[0]
        raise ModelError(
            f"The weights {path} do not fit the configuration: expected {name!r} of shape {tuple(expected)}, "
            f"got {tuple(found)}{_more(wrong)}."
        )
    if missing:
        raise ModelError(f"The weights {path} do not fit the configuration: {missing[0]!r} is missing{_more(missing)}.")
    if extra:
        raise ModelError(
            f"The weights {path} do not fit the configuration: the model has no {extra[0]!r}{_more(extra)}."
        )
    return model


def _beside_the_trunk(name: str, prefix: str) -> bool:
    """Whether a weight belongs to a head or a pooler, which no attention depends on."""
    return "pooler" in name or bool(prefix and not name.startswith(prefix) and not IN_A_LAYER.search(name))


def _recomputed(name: str) -> bool:
    return name.endswith(RECOMPUTED)


def _more(found: list[Any]) -> str:
    return f", and {len(found) - 1} more like it" if len(found) > 1 else ""
