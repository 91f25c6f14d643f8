"""MODEL -> Loaded: a folder, a config.json, weights, a name in the cache, package.module:callable, or the bundled."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from attnscale.errors import ModelError, SettingError
from attnscale.loading.adapter import base_of, is_adapter, put_on
from attnscale.loading.cache import cached, is_name
from attnscale.loading.devices import require_device
from attnscale.loading.factory import call_factory, is_factory
from attnscale.loading.gguf import SUFFIX, load_gguf
from attnscale.loading.given import require_length, require_text
from attnscale.loading.huggingface import load_huggingface, weights_beside
from attnscale.loading.inputs import make_inputs
from attnscale.loading.loaded import Loaded, Request
from attnscale.loading.telling import telling
from attnscale.loading.weights import READABLE, read_weights
from attnscale.models import CausalTransformer, encode, load_bundled
from attnscale.models.text import VOCABULARY

PARALLEL = "module."  # before every name that DistributedDataParallel saved
SEED = 0  # of a random initialisation, and of random inputs


def load_model(request: Request) -> Loaded:
    """The model asked for, in eval mode on its device, with inputs for it."""
    _check(request)
    request.report("loading the model")
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        if request.model is None:
            loaded = _bundled(request)
        elif request.factory is not None:
            loaded = _from_weights(Path(request.model), request)
        elif (path := Path(request.model)).exists():
            loaded = _from_path(path, request)
        elif is_factory(request.model):
            loaded = _from_factory(request.model, request)
        elif is_name(request.model):
            loaded = _named(request.model, request)
        else:
            raise ModelError(
                f"Expected a model's folder, a config.json or package.module:callable, and {request.model!r} is none: "
                "no such path. Models are not fetched; --download fetches one by its name, as org/name."
            )
    loaded.model.eval()
    with telling(f"move the model to {request.device}"):
        return loaded.to(request.device)


def _check(request: Request) -> None:
    if request.model is not None and not request.model.strip():
        raise SettingError("Expected a model, got an empty name; without any the bundled model is checked.")
    require_length(request.length)
    require_text(request.text)
    if request.factory is not None and (request.model is None or not is_factory(request.factory)):
        raise SettingError("Expected --model package.module:callable with a file of weights to load into it.")
    require_device(request.device)


def _bundled(request: Request) -> Loaded:
    model, example = load_bundled()
    if request.random_init:
        model.reset_parameters()
    is_asked = request.given or request.length or request.samples > 1
    tokens, fed = _bytes(model, request) if is_asked else (example, _fed(example, "English text"))
    return Loaded(
        model, f"the bundled model{', at random initialisation' if request.random_init else ''}", fed, (tokens,)
    )


def _bytes(model: CausalTransformer, request: Request) -> tuple[torch.Tensor, str]:
    length = request.length or model.context
    ids = [encode(each).tolist()[:length] if isinstance(each, str) else each[:length] for each in request.texts]
    if not request.sequences:  # parts of one text: a character may be of several bytes
        ids = [each[: min(map(len, ids))] for each in ids]
    if len({len(each) for each in ids}) > 1:
        raise SettingError("The bundled model takes no padding: expected sequences of the same length.")
    if max(max(each) for each in ids) >= VOCABULARY:
        raise SettingError(f"Expected bytes, from 0 to {VOCABULARY - 1}, as the tokens of this model.")
    tokens = torch.tensor(ids)
    return tokens, _fed(tokens, request.source)


def _fed(tokens: torch.Tensor, what: str) -> str:
    return f"{tokens.numel()} bytes of {what}"


def _from_path(path: Path, request: Request, name: str | None = None) -> Loaded:
    """A folder, a configuration or weights; `name` is how it was asked for, where it lies in the cache."""
    if path.is_dir() and is_adapter(path):
        return _adapted(path, request, name)
    found = _found(path, request)
    model = (
        load_gguf(path, request)
        if path.suffix == SUFFIX
        else load_huggingface(found.config, None if request.random_init else found.weights, request)
    )
    inputs = make_inputs(model, request, found.folder)
    is_random = request.random_init or found.weights is None
    title = f"{type(model).__name__} from {name or path}{', at random initialisation' if is_random else ''}"
    return Loaded(model, title, inputs.fed, (), inputs.kwargs, (*found.notes, *inputs.notes), inputs.unknown)


@dataclass(frozen=True)
class _Found:
    """The files of a model."""

    folder: Path
    config: Path
    weights: Path | None
    notes: tuple[str, ...] = ()


def _found(path: Path, request: Request) -> _Found:
    if path.is_dir():
        weights = weights_beside(path)
        untold = weights is None and not request.random_init
        notes = ("The folder holds no weights, so the model is at random initialisation.",) if untold else ()
        return _Found(path, path / "config.json", weights, notes)
    if path.suffix == SUFFIX:
        return _Found(path.parent, path, path)
    if path.suffix in READABLE:
        if not (path.parent / "config.json").is_file():
            read_weights(path)  # a file that is damaged or refused is told so first
            raise ModelError(
                f"{path} holds weights alone; expected a config.json beside it that says of which model, or "
                "--model package.module:callable that makes it."
            )
        return _Found(path.parent, path.parent / "config.json", path)
    if path.suffix == ".json":
        return _Found(path.parent, path, None)
    raise ModelError(
        f"Expected a model's folder, a config.json, weights as safetensors or a GGUF file, got the file {path}."
    )


def _named(name: str, request: Request) -> Loaded:
    folder = cached(name)
    if folder is None:
        raise ModelError(
            f"Expected a model's folder, a config.json or package.module:callable, and {name!r} is none: no such path. "
            "Models are not fetched but with --download, and the Hugging Face cache has none of this name."
        )
    return _from_path(folder, request, name)


def _adapted(folder: Path, request: Request, name: str | None) -> Loaded:
    """An adapter on its base, which is asked for as any model is."""
    if request.random_init:
        raise SettingError(f"--random-init goes with a model; {folder} is an adapter of one.")
    asked = request.base or base_of(folder)
    base = Path(asked)
    if request.base is not None and base.is_dir() and is_adapter(base):
        raise ModelError(f"Expected a model as --base, and {base} is an adapter too.")
    on = _from_path(base, request) if request.base is not None and base.exists() else _named(asked, request)
    return replace(on, model=put_on(on.model, folder), title=f"{on.title} with the adapter {name or folder}")


def _from_weights(path: Path, request: Request) -> Loaded:
    """A file of weights, for a model that the user's own code makes."""
    assert request.factory is not None  # asked for just before
    if path.suffix not in READABLE or not path.is_file():
        raise ModelError(f"Expected a file of weights to go with --model, as safetensors or tensors alone, got {path}.")
    loaded = _from_factory(request.factory, request)
    weights = read_weights(path)
    if weights and all(name.startswith(PARALLEL) for name in weights):
        weights = {name.removeprefix(PARALLEL): tensor for name, tensor in weights.items()}
    with telling(f"load the weights {path} into {request.factory}"):
        left = loaded.model.load_state_dict(weights, strict=False)
    for names, what in ((left.missing_keys, "is missing"), (left.unexpected_keys, "is unknown to the model")):
        if names:
            more = f", and {len(names) - 1} more like it" if len(names) > 1 else ""
            raise ModelError(f"The weights {path} do not fit {request.factory}: {names[0]!r} {what}{more}.")
    return replace(loaded, title=f"{request.factory} with {path}")


def _from_factory(spec: str, request: Request) -> Loaded:
    if request.random_init:
        raise SettingError(f"--random-init goes with a folder or the bundled model; {spec} decides on its own weights.")
    model, args, kwargs = call_factory(spec)
    if args or kwargs:
        if request.given or request.length is not None:
            raise SettingError(f"{spec} brings its own inputs; leave --text, --tokens, --data and --length out.")
        return Loaded(model, spec, "the inputs it came with", args, kwargs)
    if isinstance(model, CausalTransformer):
        tokens, fed = _bytes(model, request)
        return Loaded(model, spec, fed, (tokens,))
    if hasattr(model, "main_input_name") and hasattr(model, "config"):
        inputs = make_inputs(model, request)
        return Loaded(model, spec, inputs.fed, (), inputs.kwargs, inputs.notes, inputs.unknown)
    raise ModelError(f"{spec} returns a {type(model).__name__} without inputs; return (model, inputs) instead.")
