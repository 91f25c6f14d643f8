"""A model larger than memory: every block's weights are read as it runs, and let go of when it has run.

Matrices of a block have their place and their shape all the time, and their numbers only while the block runs. What is
outside of blocks, and every vector, stays.
"""

import ctypes
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from attnscale.errors import ModelError
from attnscale.loading.memory import require_room
from attnscale.loading.renaming import homes_by_new_name
from attnscale.loading.weights import files_of

BLOCK = re.compile(r"(?:^|.*?\.)\d+(?=\.)")  # the outermost numbered module: model.layers.3
M_MMAP_THRESHOLD, LARGE = -3, 2**20  # of glibc, malloc.h; bytes
LENGTH = 8  # bytes that say how long the header of a file is
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
BLOCKS_AT_ONCE = 2  # the one that runs, and the one that is let go of


@dataclass(frozen=True)
class Place:
    """Where the numbers of a tensor stand."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class Shelf:
    """The tensors of safetensors files, read one by one: mapped, a whole file would count as taken."""

    def __init__(self, weights: Path) -> None:
        self._places: dict[str, Place] = {}
        for file in files_of(weights):
            self._places |= _places(file)

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._places)

    def tensor(self, name: str) -> Tensor:
        """One of them, and nothing else of its file."""
        place = self._places[name]
        found = torch.empty(place.shape, dtype=place.dtype)
        with place.file.open("rb", buffering=0) as file:
            file.seek(place.start)
            into, read = memoryview(found.reshape(-1).view(torch.uint8).numpy().data), 0
            while read < len(into):
                count = file.readinto(into[read:])
                if not count:
                    raise ModelError(f"The weights in {place.file} are truncated or damaged; copy them anew.")
                read += count
        return found


def _places(file: Path) -> dict[str, Place]:
    try:
        with safe_open(file, "np"):  # every length and every place in its header is checked
            pass
    except SafetensorError as error:
        raise ModelError(f"The weights in {file} are truncated or damaged ({error}); copy them anew.") from None
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH), "little")
        header = json.loads(opened.read(length))
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ModelError(f"Expected numbers that torch knows in {file}, got {entry['dtype']!r} of {name!r}.")
        start = LENGTH + length + entry["data_offsets"][0]
        found[name] = Place(file, DTYPES[entry["dtype"]], tuple(entry["shape"]), start)
    return found


def can_stream(weights: Path, device: str) -> bool:
    """Whether weights can be read in parts: safetensors, for a model that runs where they are read."""
    return device == "cpu" and all(file.suffix == ".safetensors" for file in files_of(weights))


def streamed(make: Any, config: Any, weights: Path) -> nn.Module:
    """The model of a class, whose blocks read their weights as they run; refused where they do not fit so either."""
    _give_back_at_once()
    shelf = Shelf(weights)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    with _without_numbers(), _default(dtype):
        model: nn.Module = make(config)
    homes = _homes(model, shelf.names, f"{make.base_model_prefix}.")
    blocks = _blocks(model, homes, weights)
    sizes = {name: parameter.numel() * dtype.itemsize for name, parameter in model.named_parameters()}
    inside = {name for names in blocks.values() for name in names}
    largest = max(sum(sizes[name] for name in names) for names in blocks.values())
    require_room(sum(size for name, size in sizes.items() if name not in inside) + BLOCKS_AT_ONCE * largest, "cpu")
    for name, home in homes.items():
        _place(model, name, dtype, None if name in inside else shelf.tensor(home))
    model.tie_weights()  # type: ignore[operator]  # of transformers' own classes
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left:
        raise ModelError(f"The weights {weights} do not fit the configuration: {left[0]!r} is missing.")
    modules = dict(model.named_modules())
    for path, names in blocks.items():
        read = {model.get_parameter(name): homes[name] for name in names}
        modules[path].register_forward_pre_hook(_reading(shelf, read))
        modules[path].register_forward_hook(_letting_go(read), always_call=True)
    return model.requires_grad_(requires_grad=False)


def is_here(parameter: Tensor) -> bool:
    """Whether a parameter has its numbers now."""
    return parameter.untyped_storage().nbytes() > 0 or parameter.numel() == 0


def _reading(shelf: Shelf, read: Mapping[nn.Parameter, str]) -> Any:
    def fill(module: nn.Module, args: Any) -> None:
        for parameter, home in read.items():
            parameter.untyped_storage().resize_(parameter.numel() * parameter.itemsize)
            parameter.data.copy_(shelf.tensor(home))

    return fill


def _letting_go(read: Mapping[nn.Parameter, str]) -> Any:
    def empty(module: nn.Module, args: Any, output: Any) -> None:
        for parameter in read:
            parameter.untyped_storage().resize_(0)

    return empty


def _homes(model: nn.Module, stored: set[str], prefix: str) -> dict[str, str]:
    """What each parameter is called in the files: as in the model, or by an older name, with or without its trunk's."""
    known = homes_by_new_name(model, stored) | {name: name for name in stored}
    found = {}
    for name, _ in model.named_parameters():
        ways = (name, name.removeprefix(prefix), f"{prefix}{name}")
        home = next((known[way] for way in ways if way in known), None)
        if home is not None:
            found[name] = home
    return found


def _blocks(model: nn.Module, homes: Mapping[str, str], weights: Path) -> dict[str, list[str]]:
    """The matrices of every block, each in a file under its own name."""
    found: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        block = BLOCK.match(name)
        if block is None or parameter.dim() < 2:
            continue
        if name not in homes:
            raise ModelError(
                f"Out of memory: {weights} does not fit, and cannot be read block by block: {name!r} is not in it "
                "under that name."
            )
        found.setdefault(block[0], []).append(name)
    if not found:
        raise ModelError(f"Out of memory: {weights} does not fit, and the model has no blocks to read one by one.")
    return found


def _place(model: nn.Module, name: str, dtype: torch.dtype, values: Tensor | None) -> None:
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    shape = module.get_parameter(own).shape
    if values is not None and values.shape != shape:
        raise ModelError(
            f"The weights do not fit: expected {name!r} of shape {tuple(shape)}, got {tuple(values.shape)}."
        )
    if values is None:
        values = torch.empty(shape, dtype=dtype)
        values.untyped_storage().resize_(0)
    module.register_parameter(own, nn.Parameter(values.to(dtype) if is_here(values) else values, requires_grad=False))


def _give_back_at_once() -> None:
    """Have the C library return large pieces of memory when they are freed: it keeps them for later by itself."""
    try:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)
    except (AttributeError, OSError, TypeError):  # another C library
        return


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _without_numbers() -> Iterator[None]:
    """Parameters made within have shapes and no numbers; buffers, which no file may hold, are computed as ever."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
