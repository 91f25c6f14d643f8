"""Load Hugging Face models from a folder, a config.json or a GGUF file, with transformers' own classes only."""

import re
import shutil
import tempfile
import weakref
from contextlib import redirect_stderr
from copy import deepcopy
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnscale.errors import ModelError
from attnscale.loading.config import read_config, safe
from attnscale.loading.model_errors import as_model_error, quiet, require_package
from attnscale.loading.request import Request
from attnscale.loading.weights import has_memory, read_weights, require_memory, weight_files, weights_size

GGUF = ".gguf"
IN_A_LAYER = re.compile(r"\.\d+\.")  # a name such as encoder.layer.3.…, which is no part of an output head
RECOMPUTED = ("position_ids", "inv_freq", "masked_bias", "attn.bias")  # buffers that older checkpoints contain


def load_huggingface(config_path: Path, weights_path: Path | None, request: Request) -> nn.Module:
    """Load the model of a config.json; initialise it randomly if there are no weights."""
    raw = read_config(config_path, request.model_type)
    if raw.pop("quantization_config", None) is not None and weights_path is not None:
        raise ModelError(
            f"The weights in {config_path.parent} are quantised, which is not supported. "
            "Use --random-init to check the architecture alone."
        )
    config = _config_of(raw, config_path)
    if weights_path is None:
        config.dtype = torch.float32
    with quiet(), as_model_error(f"build a {raw['model_type']} model from {config_path}"):
        model_class = _model_class(config)
        needed = _size(_meta_model(model_class, config), config)
        if weights_path is None:
            require_memory(needed, request.device)
            model: nn.Module = model_class(config)
            return model
    request.report("reading weights")
    with quiet(), as_model_error(f"load the weights {weights_path}"):
        needed = max(needed, weights_size(weights_path))
        is_offloadable = request.device == "cpu" and weight_files(weights_path)[0].suffix == ".safetensors"
        if is_offloadable and not has_memory(needed, "cpu"):
            return _load_offloaded(model_class, config, weights_path)
        require_memory(needed, request.device)
        return _from_pretrained(model_class, config, weights_path, state_dict=read_weights(weights_path))


def load_gguf(path: Path, request: Request) -> nn.Module:
    """Load the model in a GGUF file, and dequantise its weights."""
    transformers_package()
    require_package("gguf", f"Reading {path}", "gguf")
    reader: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    require_memory(path.stat().st_size, "cpu")
    with quiet(), as_model_error(f"read {path}"):
        raw = safe(dict(reader.load_gguf_checkpoint(str(path), return_tensors=False)["config"]), path)
        config = _config_of(raw, path)
        config.dtype = torch.float32
        causal_models = transformers_package().MODEL_FOR_CAUSAL_LM_MAPPING
        model_class = causal_models[type(config)] if type(config) in causal_models else _model_class(config)
        meta_model = _meta_model(model_class, config)
        require_memory(_size(meta_model, config), request.device)
        if request.random_init:
            model: nn.Module = model_class(config)
            return model
    request.report("reading weights")
    with quiet(), as_model_error(f"load the weights {path}"), redirect_stderr(StringIO()):  # gguf prints a progress bar
        tensors = reader.load_gguf_checkpoint(str(path), True, meta_model, torch.float32)["tensors"]
        return _from_pretrained(model_class, config, path, state_dict=tensors)


def transformers_package() -> Any:
    """Import transformers."""
    require_package("transformers", "A Hugging Face model")
    return import_module("transformers")


def _config_of(raw: dict[str, Any], path: Path) -> Any:
    transformers, model_type = transformers_package(), raw.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        raise ModelError(
            f"Unknown model_type {model_type!r} in {path}: transformers {transformers.__version__} has no such model, "
            "and code that comes with a model is never run."
        )
    with quiet(), as_model_error(f"build a {model_type} model from {path}"):
        return transformers.CONFIG_MAPPING[model_type].from_dict(raw)


def _model_class(config: Any) -> Any:
    """Return the class named in the configuration if transformers has it, else the model without an output head."""
    transformers = transformers_package()
    for name in config.architectures if isinstance(config.architectures, list) else []:
        found: Any = getattr(transformers, str(name), None)
        is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
        if is_model and found.config_class is type(config):
            return found
    found = transformers.MODEL_MAPPING[type(config)]
    return found[0] if isinstance(found, tuple | list) else found


def _meta_model(model_class: Any, config: Any) -> Any:
    with torch.device("meta"):
        return model_class(deepcopy(config))


def _size(meta_model: Any, config: Any) -> int:
    itemsize = config.dtype.itemsize if isinstance(config.dtype, torch.dtype) else torch.float16.itemsize
    count = sum(tensor.numel() for tensor in (*meta_model.parameters(), *meta_model.buffers()))
    return int(itemsize * count)


def _load_offloaded(model_class: Any, config: Any, weights: Path) -> nn.Module:
    """Load a model larger than memory: accelerate reads the weights of each module from disk when it runs."""
    require_package("accelerate", f"{weights} does not fit into memory, and running it from disk")
    folder = Path(tempfile.mkdtemp(prefix="attnscale-"))
    try:
        # transformers reads other files of a folder too, so it gets a folder with nothing but the weights.
        whole = weights.name if weights.suffix == ".json" else "model.safetensors"
        links = {whole: weights} | {file.name: file for file in weight_files(weights) if file != weights}
        for name, file in links.items():
            (folder / name).symlink_to(file.resolve())
        (folder / "generation_config.json").write_text("{}", encoding="ascii")
        model = _from_pretrained(
            model_class, config, weights, folder, device_map={"": "disk"}, offload_folder=folder, use_safetensors=True
        )
        if not hasattr(model, "_hf_hook"):
            raise ModelError(f"{weights} does not fit into memory, and running it from disk needs transformers 5.13.")
        _keep_vectors_in_memory(model)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    return model


def _keep_vectors_in_memory(model: nn.Module) -> None:
    """Keep the parameters of norms in memory; is_trained() reads them."""
    remove_hook = import_module("accelerate.hooks").remove_hook_from_module
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and all(parameter.dim() <= 1 for parameter in own):
            hook: Any = module._hf_hook
            hook.pre_forward(module)
            remove_hook(module)


def _from_pretrained(
    model_class: Any, config: Any, path: Path, folder: Path | None = None, **options: Any
) -> nn.Module:
    """Build a model with weights from tensors or a folder; raise an error for weights that do not fit."""
    model: nn.Module
    model, info = model_class.from_pretrained(
        folder,
        config=config,
        dtype="auto",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        local_files_only=True,
        trust_remote_code=False,
        use_kernels=False,
        **options,
    )
    prefix = f"{model_class.base_model_prefix}."
    has_head = any(name.startswith(prefix) for name in model.state_dict())
    missing = [name for name in info["missing_keys"] if not _is_in_a_head(name, prefix if has_head else "")]
    extra = [name for name in info["unexpected_keys"] if IN_A_LAYER.search(name) and not name.endswith(RECOMPUTED)]
    wrong = [
        f"expected {name!r} of shape {tuple(expected)}, got {tuple(found)}"
        for name, found, expected in sorted(info["mismatched_keys"])
    ]
    for faults in (
        wrong,
        [f"{name!r} is missing" for name in sorted(missing)],
        [f"the model has no {name!r}" for name in sorted(extra)],
    ):
        if faults:
            more = f", and {len(faults) - 1} more like it" if len(faults) > 1 else ""
            raise ModelError(f"The weights {path} do not fit the configuration: {faults[0]}{more}.")
    return model


def _is_in_a_head(name: str, prefix: str) -> bool:
    """Return True for weights of an output head or a pooler, which do not affect attention."""
    return "pooler" in name or bool(prefix and not name.startswith(prefix) and not IN_A_LAYER.search(name))
