"""Read weights from safetensors, or from a pickle with nothing but tensors."""

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

# Names of weights in order of preference; an index lists the files of a large model.
NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
READABLE = {".safetensors", ".bin", ".pt", ".pth"}
UNREADABLE = {".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".npz"}  # formats that are not read from a folder
GIB = 2**30
MAX_SHARE = 0.8  # largest share of the free memory for weights; activations need the rest
CGROUP = Path("/sys/fs/cgroup")  # folder with the memory limit of a container


def find_weights(folder: Path) -> Path | None:
    """Return the path of the weights in a model's folder, or None if it has none."""
    for name in NAMES:
        if (folder / name).is_file():
            return folder / name
    others = sorted(path for path in folder.iterdir() if path.suffix in READABLE | UNREADABLE and path.is_file())
    readable = [path for path in others if path.suffix in READABLE]
    if len(readable) == 1:
        return readable[0]
    if others:
        names = ", ".join(path.name for path in others[:3])
        advice = "; give the GGUF file itself" if any(path.suffix == ".gguf" for path in others) else ""
        raise ModelError(f"Expected the weights in {folder} as model.safetensors, found {names}{advice}.")
    return None


def weight_files(path: Path) -> list[Path]:
    """Return the file itself, or all files listed in an index."""
    if path.suffix != ".json":
        return [path]
    index = read_json(path)
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ModelError(f"Expected a 'weight_map' of file names in {path}, and there is none.")
    for name in sorted(set(listed.values())):
        if name in ("", ".", "..") or Path(name).name != name:
            raise ModelError(f"Expected every file listed in {path} to lie beside it, got {name!r}.")
        if not (path.parent / name).is_file():
            raise ModelError(f"Expected the file {name} beside {path}, which lists it, and it is missing.")
    return [path.parent / name for name in sorted(set(listed.values()))]


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors in a file, or in all files listed in an index."""
    require_memory(weights_size(path), "cpu")
    weights: dict[str, Tensor] = {}
    for file in weight_files(path):
        try:
            weights |= load_file(file) if file.suffix == ".safetensors" else _read_pickle(file)
        except SafetensorError as error:
            raise ModelError(f"The weights in {file} are truncated or damaged ({error}). Copy them again.") from None
        except OSError as error:
            raise ModelError(f"Could not read {file}: {error.strerror or error}.") from None
    return weights


def weights_size(path: Path) -> int:
    """Return the size in bytes of a file, or of all files listed in an index."""
    return sum(file.stat().st_size for file in weight_files(path))


def require_memory(needed: int, device: str) -> None:
    """Raise an error if weights do not fit into the free memory; the system would kill the process silently."""
    if not has_memory(needed, device):
        raise ModelError(
            f"Out of memory: the model's weights take {needed / GIB:,.1f} GiB, and {free_memory(device) / GIB:,.1f} "
            f"GiB are free on {device}, of which they may take {MAX_SHARE:.0%}."
        )


def has_memory(needed: int, device: str) -> bool:
    """Return True if weights of this many bytes fit into the free memory of a device."""
    return needed <= MAX_SHARE * free_memory(device)


def free_memory(device: str) -> float:
    """Return the free memory of a device in bytes; infinity if it is unknown."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    free = [float("inf")]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit, used = ((CGROUP / f"memory.{name}").read_text(encoding="ascii") for name in ("max", "current"))
        free.append(int(limit) - int(used))  # raises ValueError if there is no limit
    except (OSError, ValueError):
        pass
    return max(min(free), 0)


def _read_pickle(path: Path) -> dict[str, Tensor]:
    _require_uncompressed(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns about pickle protocols that it does not write
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ModelError(
            f"Refused {path}: this pickle holds more than tensors, and loading it could run code. "
            "Save the weights as safetensors."
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = str(error).split("\n", maxsplit=1)[0] or type(error).__name__
        raise ModelError(f"The weights in {path} are truncated or damaged ({reason}). Copy them again.") from None
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise ModelError(f"Expected tensors by name in {path}, and it holds something else.")
    for name, tensor in content.items():
        if tensor.layout != torch.strided or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise ModelError(f"Refused {path}: {name!r} is sparse or expanded, and would take more memory when used.")
    return content


def _require_uncompressed(path: Path) -> None:
    """Raise an error for a compressed archive, which could unpack to any size; torch.save does not compress."""
    try:
        with zipfile.ZipFile(path) as archive:
            is_compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return  # a pickle of an older torch, or a damaged file, which is reported when it is read
    if is_compressed:
        raise ModelError(
            f"Refused {path}: it is compressed, which torch.save never does, and could unpack to any size."
        )
