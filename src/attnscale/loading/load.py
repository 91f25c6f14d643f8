"""MODEL -> Loaded: a folder, a config.json, a file of weights, package.module:callable, or the bundled model."""

from pathlib import Path

import torch

from attnscale.errors import ModelError, SettingError
from attnscale.loading.devices import require_device
from attnscale.loading.factory import call_factory, is_factory
from attnscale.loading.huggingface import load_huggingface, weights_beside
from attnscale.loading.inputs import make_inputs
from attnscale.loading.loaded import Loaded, Request
from attnscale.loading.telling import telling
from attnscale.loading.weights import READABLE, read_weights
from attnscale.models import CausalTransformer, encode, load_bundled
from attnscale.models.text import VOCABULARY

MOST_LENGTH = 2**20  # tokens: beyond the longest contexts there are
SEED = 0  # of a random initialisation, and of random inputs


def load_model(request: Request) -> Loaded:
    """The model asked for, in eval mode on its device, with inputs for it."""
    _check(request)
    request.report("loading the model")
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        if request.model is None:
            loaded = _bundled(request)
        elif (path := Path(request.model)).exists():
            loaded = _from_path(path, request)
        elif is_factory(request.model):
            loaded = _from_factory(request.model, request)
        else:
            raise ModelError(
                f"Expected a model's folder, a config.json or package.module:callable, and {request.model!r} is none: "
                "no such path. Models are not fetched; download them first."
            )
    loaded.model.eval()
    with telling(f"move the model to {request.device}"):
        return loaded.to(request.device)


def _check(request: Request) -> None:
    if request.length is not None and not 2 <= request.length <= MOST_LENGTH:
        raise SettingError(f"Expected --length from 2 to {MOST_LENGTH:,}, got {request.length}.")
    if request.text is not None and len(request.text.encode("utf-8")) < 2:
        raise SettingError("Expected a text of at least two characters, and it is shorter.")
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


def _from_path(path: Path, request: Request) -> Loaded:
    if path.is_dir():
        folder, weights = path, weights_beside(path)
    elif path.suffix in READABLE:
        folder, weights = path.parent, path
        if not (folder / "config.json").is_file():
            read_weights(path)  # a file that is damaged or refused is told so first
            raise ModelError(f"{path} holds weights alone; expected a config.json beside it that says of which model.")
    elif path.suffix == ".json":
        folder, weights = path.parent, None
    else:
        raise ModelError(f"Expected a model's folder, a config.json or weights as safetensors, got the file {path}.")
    config = path if path.suffix == ".json" else folder / "config.json"
    notes = []
    if path.is_dir() and weights is None and not request.random_init:
        notes.append("The folder holds no weights, so the model is at random initialisation.")
    weights = None if request.random_init else weights
    model = load_huggingface(config, weights, request)
    inputs = make_inputs(model, request, folder)
    title = f"{type(model).__name__} from {path}{'' if weights else ', at random initialisation'}"
    return Loaded(model, title, inputs.fed, (), inputs.kwargs, (*notes, *inputs.notes), inputs.unknown)


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
