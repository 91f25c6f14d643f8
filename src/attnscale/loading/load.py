"""Load a model from a folder, a file, the cache or a function; load the bundled model by default."""

import re
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnscale.errors import ModelError, SettingError
from attnscale.loading.config import read_json, read_safe_json
from attnscale.loading.hub import cached_folder, is_name
from attnscale.loading.huggingface import GGUF, load_gguf, load_huggingface
from attnscale.loading.inputs import Loaded, map_tensors, texts_of, with_inputs
from attnscale.loading.model_errors import as_model_error, quiet, require_package
from attnscale.loading.request import Request
from attnscale.loading.weights import READABLE, find_weights, read_weights
from attnscale.models import CausalTransformer, encode, load_bundled
from attnscale.models.text import VOCABULARY

FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")  # package.module:callable
SEED = 0  # for a random initialisation and random inputs
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# Fields of an adapter's configuration that name other files or run code.
UNSAFE = {"auto_mapping", "megatron_config", "runtime_config", "loftq_config", "eva_config", "corda_config"}
NO_MODEL = "Expected a model's folder, a config.json, org/name or package.module:callable"


def load_model(request: Request) -> Loaded:
    """Load the requested model on its device, in evaluation mode, with inputs."""
    if request.model is not None and not request.model.strip():
        raise SettingError("Expected a model, got an empty name. Without MODEL, the bundled model is checked.")
    require_device(request.device)
    request.report("loading the model")
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        if request.model is None:
            loaded = _bundled(request)
        elif (path := Path(request.model)).exists():
            loaded = _from_path(path, request)
        elif FACTORY.fullmatch(request.model):
            loaded = _from_factory(request.model, request)
        elif is_name(request.model):
            loaded = _from_path(cached_folder(request.model), request, request.model)
        else:
            raise ModelError(f"{NO_MODEL}, got {request.model!r}: no such file or folder.")
    loaded.model.eval()
    with as_model_error(f"move the model to {request.device}"):
        device = torch.device(request.device)
        if "disk" not in getattr(loaded.model, "hf_device_map", {}).values():
            loaded.model.to(device)
        args, kwargs = map_tensors(lambda tensor: tensor.to(device), (loaded.args, dict(loaded.kwargs)))
        return replace(loaded, args=args, kwargs=kwargs)


def require_device(device: str) -> None:
    """Raise an error if this machine does not have the device."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    try:
        if not available.get(device.partition(":")[0]):
            raise RuntimeError
        torch.zeros(1, device=device)
    except RuntimeError:
        present = ", ".join(name for name, is_available in available.items() if is_available)
        raise SettingError(f"Expected a device that this machine has ({present}), got {device!r}.") from None


def _bundled(request: Request) -> Loaded:
    model, example = load_bundled()
    if request.random_init:
        model.reset_parameters()
    title = f"the bundled model{', at random initialisation' if request.random_init else ''}"
    if request.user_sequences or request.length or request.samples > 1:
        return _on_bytes(model, title, request)
    return Loaded(model, title, f"{example.numel()} bytes of English text", (example,))


def _on_bytes(model: CausalTransformer, title: str, request: Request) -> Loaded:
    """Return a model of bytes with a text as its input."""
    length = request.length or model.context
    ids = [encode(each).tolist()[:length] if isinstance(each, str) else each[:length] for each in texts_of(request)]
    if not request.sequences:  # parts of one text differ in bytes, because a character may take several
        ids = [each[: min(map(len, ids))] for each in ids]
    if len({len(each) for each in ids}) > 1:
        raise SettingError("The bundled model takes no padding: expected sequences of the same length.")
    if max(max(each) for each in ids) >= VOCABULARY:
        raise SettingError(f"This model takes bytes: expected tokens from 0 to {VOCABULARY - 1}.")
    tokens = torch.tensor(ids)
    return Loaded(model, title, f"{tokens.numel()} bytes of {request.source}", (tokens,))


def _from_path(path: Path, request: Request, name: str | None = None) -> Loaded:
    """Load from a folder or a file; `name` is the user's name for a model in the cache."""
    if _is_adapter(path):
        return _from_adapter(path, request, name)
    notes = []
    if path.suffix == GGUF and path.is_file():
        is_random, model = request.random_init, load_gguf(path, request)
    else:
        config, weights = _find_files(path)
        is_random = weights is None or request.random_init
        if path.is_dir() and weights is None and not request.random_init:
            notes.append("The folder holds no weights, so the model is at random initialisation.")
        model = load_huggingface(config, None if is_random else weights, request)
    title = f"{type(model).__name__} from {name or path}{', at random initialisation' if is_random else ''}"
    return with_inputs(model, title, request, path if path.is_dir() else path.parent, notes)


def _find_files(path: Path) -> tuple[Path, Path | None]:
    """Return the configuration and the weights of a model."""
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"Expected a config.json in {path}, and there is none: no model to check.")
        return path / "config.json", find_weights(path)
    if path.suffix == ".json":
        return path, None
    if path.suffix not in READABLE:
        raise ModelError(
            f"Expected a model's folder, a config.json, weights as safetensors or a GGUF file, got the file {path}."
        )
    if not (path.parent / "config.json").is_file():
        read_weights(path)  # report a damaged or unsafe file first
        raise ModelError(
            f"{path} holds weights alone. Expected a config.json beside it, or package.module:callable, which "
            "makes the model and loads its weights."
        )
    return path.parent / "config.json", path


def _from_adapter(folder: Path, request: Request, name: str | None) -> Loaded:
    if request.random_init:
        raise SettingError(f"--random-init is for a model, and {folder} is an adapter.")
    base = request.base or _base_of(folder)
    if request.base is not None and (path := Path(base)).exists():
        if _is_adapter(path):
            raise ModelError(f"Expected a model as --base, and {base} is an adapter too.")
        loaded = _from_path(path, request)
    else:
        loaded = _from_path(cached_folder(base), request, base)
    title = f"{loaded.title} with the adapter {name or folder}"
    return replace(loaded, model=_apply_adapter(loaded.model, folder), title=title)


def _is_adapter(path: Path) -> bool:
    """Return True for a folder with an adapter and without a model."""
    return (path / ADAPTER).is_file() and not (path / "config.json").is_file()


def _base_of(folder: Path) -> str:
    """Return the name of an adapter's base model; raise an error for a path."""
    config = read_json(folder / ADAPTER)
    name = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(name, str) or not is_name(name):
        raise ModelError(
            f"The adapter {folder} names its base model as {name!r}, which is not a model's name. "
            "Give the base with --base, as a folder or as org/name."
        )
    return name


def _apply_adapter(model: nn.Module, folder: Path) -> nn.Module:
    """Return the model with the adapter applied, and merged if its type supports merging."""
    require_package("peft", f"The adapter in {folder}", "peft")
    weights = next((folder / name for name in ADAPTER_WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise ModelError(f"Expected the weights of an adapter in {folder} as {ADAPTER_WEIGHTS[0]}, and there are none.")
    raw = read_safe_json(folder / ADAPTER)
    with quiet(), as_model_error(f"put the adapter {folder} on its base"):
        peft: Any = import_module("peft")
        adapted: Any = peft.get_peft_model(model, _adapter_config(peft, raw, folder))
        found = peft.set_peft_model_state_dict(adapted, read_weights(weights))
        faults = [f"the base has no {name!r}" for name in found.unexpected_keys]
        faults += [f"{name!r} is missing" for name in found.missing_keys if "lora_" in name]
        if faults:
            raise ModelError(f"The adapter {folder} does not fit its base: {faults[0]}.")
        merged: nn.Module = adapted.merge_and_unload() if hasattr(adapted, "merge_and_unload") else adapted
        return merged


def _adapter_config(peft: Any, raw: Any, folder: Path) -> Any:
    kinds = {str(getattr(kind, "value", kind)): made for kind, made in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    kind = raw.get("peft_type") if isinstance(raw, dict) else None
    if kind not in kinds:
        raise ModelError(f"Unknown peft_type {kind!r} in {folder / ADAPTER}: peft {peft.__version__} does not have it.")
    names = {field.name for field in fields(kinds[kind]) if field.init} - UNSAFE
    return kinds[kind](**{name: value for name, value in raw.items() if name in names} | {"inference_mode": True})


def _from_factory(spec: str, request: Request) -> Loaded:
    if request.random_init:
        raise SettingError(f"--random-init is for a folder or the bundled model; {spec} makes its own weights.")
    with as_model_error(f"make the model {spec}"):
        made = _call_factory(spec)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Expected {spec} to be or to return an nn.Module, alone or as (model, inputs), got {type(made).__name__}."
        )
    if inputs is not None:
        if not isinstance(inputs, Tensor | tuple | list | Mapping):
            raise ModelError(
                f"Expected the inputs of {spec} as a tensor, a tuple or a dict of them, got {type(inputs).__name__}."
            )
        if request.user_sequences or request.length is not None:
            raise SettingError(f"{spec} brings its own inputs; leave --text, --data and --length out.")
        kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
        args = (inputs,) if isinstance(inputs, Tensor) else () if kwargs else tuple(inputs)
        return Loaded(model, spec, "the inputs it came with", args, kwargs)
    if isinstance(model, CausalTransformer):
        return _on_bytes(model, spec, request)
    if hasattr(model, "main_input_name") and hasattr(model, "config"):
        return with_inputs(model, spec, request)
    raise ModelError(f"{spec} returns a {type(model).__name__} without inputs; return (model, inputs) instead.")


def _call_factory(spec: str) -> Any:
    module_name, _, path = spec.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does; not removed, because a model may import when it runs
    found: Any = import_module(module_name)
    for name in path.split("."):
        found = getattr(found, name)
    return found if isinstance(found, nn.Module) or not callable(found) else found()
