"""Weights from files: safetensors first; a pickle only as far as it holds nothing but tensors."""

import pickle
import warnings
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from attnscale.errors import ModelError
from attnscale.loading.config import read_json
from attnscale.loading.memory import require_room

# In the order they are preferred; an index lists the files that a large model is cut into.
NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
FOREIGN = {".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".npz"}  # weights of other programs
READABLE = {".safetensors", ".bin", ".pt", ".pth"}


def find_weights(folder: Path) -> Path | None:
    """The weights of a model's folder, or None where it has none."""
    for name in NAMES:
        if (folder / name).is_file():
            return folder / name
    others = sorted(path for path in folder.iterdir() if path.suffix in READABLE | FOREIGN and path.is_file())
    own = [path for path in others if path.suffix in READABLE]
    if len(own) == 1:
        return own[0]
    if others:
        names = ", ".join(path.name for path in others[:3])
        given = "; give the GGUF file itself" if any(path.suffix == ".gguf" for path in others) else ""
        raise ModelError(f"Expected the weights in {folder} as model.safetensors, found {names}{given}.")
    return None


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors in a file, or in all the files that an index lists."""
    if path.suffix != ".json":
        return _read_file(path)
    weights: dict[str, Tensor] = {}
    for shard in files_of(path):
        weights |= _read_file(shard)
    return weights


def size_of(path: Path) -> int:
    """Bytes of the weights in a file, or in all the files that an index lists."""
    return sum(file.stat().st_size for file in files_of(path))


def files_of(path: Path) -> list[Path]:
    """The file of weights, or all that an index lists."""
    return [path] if path.suffix != ".json" else _shards(path)


def _shards(index: Path) -> list[Path]:
    content = read_json(index)
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ModelError(f"Expected a 'weight_map' of file names in {index}, and there is none.")
    shards = [index.parent / name for name in sorted(set(listed.values()))]
    for shard in shards:
        if shard.name != str(shard.relative_to(index.parent) if shard.is_relative_to(index.parent) else shard):
            raise ModelError(f"Expected every file that {index} lists to lie beside it, got {str(shard)!r}.")
        if not shard.is_file():
            raise ModelError(f"Expected {shard.name} beside {index}, which lists it, and it is missing.")
    return shards


def _read_file(path: Path) -> dict[str, Tensor]:
    require_room(path.stat().st_size, "cpu")
    try:
        return load_file(path) if path.suffix == ".safetensors" else _read_pickle(path)
    except SafetensorError as error:
        raise ModelError(f"The weights in {path} are truncated or damaged ({error}); copy them anew.") from None
    except OSError as error:
        raise ModelError(f"Could not read {path}: {error.strerror or error}.") from None


def _require_stored(path: Path) -> None:
    """Refuse an archive that unpacks to more than it is; torch packs nothing."""
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return  # a pickle as torch wrote them before, or one that is damaged, which is told below
    if packed:
        raise ModelError(
            f"Refused {path}: it is compressed, and could unpack to any size; torch.save writes none such."
        )


def _require_whole(path: Path, tensors: dict[str, Tensor]) -> None:
    """Refuse tensors that are more than what is stored of them."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise ModelError(f"Refused {path}: {name!r} is sparse or repeats what is stored, and would grow when used.")


def _read_pickle(path: Path) -> dict[str, Tensor]:
    _require_stored(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # on protocols that torch itself does not write
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ModelError(
            f"Refused {path}: this pickle holds more than tensors, and loading it could run code; "
            "save the weights as safetensors."
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = str(error).split("\n", maxsplit=1)[0] or type(error).__name__
        raise ModelError(f"The weights in {path} are truncated or damaged ({reason}); copy them anew.") from None
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise ModelError(f"Expected tensors by name in {path}, and it holds something else.")
    _require_whole(path, content)
    return content
