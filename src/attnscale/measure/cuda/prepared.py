"""Launches that are prepared once for a layout of tensors: a training run calls the same layouts again and again."""
# mypy: disable-error-code="import-untyped"

from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnscale.measure.cuda.taking import kernels_take_vectors

Layout = tuple[Any, ...]  # shape, strides, dtype, device, alignment, as layout_of() gives them


def takes(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Return True if the kernels take these tensors as they are, on the current device."""
    if query.device.index != torch.cuda.current_device() or not kernels_take_vectors(query, key):
        return False
    if query.dtype != key.dtype or query.stride(-1) != 1 or key.stride(-1) != 1 or len(query) != len(key):
        return False
    return mask is None or (mask.dim() == 4 and mask.dtype == torch.bool and mask.shape[-1] == key.shape[2])


class Launch:
    """A launch of a kernel whose arguments behind its tensors are known."""

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], scalars: tuple[Any, ...], constants: tuple[Any, ...], warps: int,
        stages: int,
    ) -> None:  # fmt: skip
        self._kernel, self._grid, self._scalars = kernel, grid, scalars
        self._constants, self._options = constants, {"num_warps": warps, "num_stages": stages}
        self._compiled: dict[int, Any] = {}  # by the alignment of positions, the one tensor whose layout varies

    def __call__(self, *tensors: Tensor, alignment: int = 0) -> None:
        """Launch on the current stream."""
        from attnscale.measure.cuda.triton.launching import Compiled

        compiled = self._compiled.get(alignment)
        if compiled is not None:
            compiled.run((*self._grid, 1, 1), (*tensors, *self._scalars, *self._constants))
            return
        found = self._kernel[self._grid](*tensors, *self._scalars, *self._constants, **self._options)
        if found is not None:  # triton's interpreter compiles nothing
            self._compiled[alignment] = Compiled(found)


class Longest:
    """The largest squared length of the vectors in each chunk of a head, (batch, heads, chunks)."""

    def __init__(self, vectors: Layout) -> None:
        from attnscale.measure.cuda.triton.largest import longest_kernel
        from attnscale.measure.cuda.triton.launch import LEAST_WIDTH
        from attnscale.measure.cuda.triton.showing import CHUNK, LENGTHS_AT_ONCE, MOST_CHUNKS
        from attnscale.measure.cuda.triton.tiles import padded_width

        (batch, heads, length, head_dim), strides, *_ = vectors
        chunks = min(MOST_CHUNKS, padded_width(-(-length // CHUNK), 1))
        self.shape = batch, heads, chunks
        self._launch = Launch(
            longest_kernel,
            (batch * heads * chunks,),
            (*strides[:3], heads, length, -(-length // chunks)),
            (chunks, head_dim, padded_width(head_dim, LEAST_WIDTH), LENGTHS_AT_ONCE),
            4,
            2,
        )

    def __call__(self, vectors: Tensor) -> Tensor:
        """Measure vectors of this layout."""
        found = torch.empty(self.shape, dtype=torch.float32, device=vectors.device)
        self._launch(vectors, found)
        return found


def mask_strides(mask: Layout | None) -> tuple[int, ...]:
    """The strides of a mask; none along what it is the same for."""
    if mask is None:
        return (0, 0, 0, 0)
    return tuple(0 if size == 1 else stride for size, stride in zip(mask[0], mask[1], strict=True))


@cache
def no_document(device: torch.device) -> Tensor:
    """The document of every key, where that of a row says whether it is padding."""
    return torch.zeros(1, dtype=torch.uint8, device=device)
