"""How the Triton kernels are cut: plain tables, since autotuning needs a GPU and cannot run under graph capture."""

from typing import NamedTuple

import torch

LEAST_WIDTH = 16  # the narrowest product of tiles
TENSOR_CORES = (8, 0)  # the first capability whose tensor cores multiply bfloat16
SAMPLED_ROWS = 64  # at most, of one tile: a head's sample by default


class Tiles(NamedTuple):
    """How a kernel is cut: query rows and keys a tile, and how a GPU runs one."""

    rows: int
    keys: int
    warps: int
    stages: int


# By the head dimension, padded to a power of two: what won on an H200, for Hopper and data-centre Blackwell,
LARGE = {64: Tiles(128, 64, 8, 3), 128: Tiles(128, 128, 8, 2), 256: Tiles(128, 32, 8, 2)}
# what fits 99 KB of shared memory, for other GPUs, and what fits the registers where no tensor core multiplies.
SMALL = {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(64, 32, 8, 2)}
PLAIN = {64: Tiles(32, 32, 4, 1), 128: Tiles(32, 32, 8, 1), 256: Tiles(32, 16, 8, 1)}
# float32 as three products on tensor cores: twice the bytes, and the halves of both operands beside them.
LARGE_FLOAT32 = {64: Tiles(128, 64, 8, 2), 128: Tiles(64, 64, 8, 1), 256: Tiles(64, 32, 8, 1)}
SMALL_FLOAT32 = {64: Tiles(64, 32, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)}
FEW_ROWS = 16  # of a decoding step: what a tile of tensor cores holds at least


def padded_width(head_dim: int, least: int) -> int:
    """Return the power of two that a tile is wide."""
    return max(1 << (head_dim - 1).bit_length(), least)


def tiles(head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> Tiles:
    """Return the tiles of a pass over every row."""
    if capability < TENSOR_CORES:
        table = PLAIN
    elif dtype == torch.float32:
        table = LARGE_FLOAT32 if _large(capability) else SMALL_FLOAT32
    else:
        table = LARGE if _large(capability) else SMALL
    return table[padded_width(head_dim, 64)]


def decoding_tiles(head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> Tiles:
    """Return the tiles of a pass over rows so few that reading keys and values is all the work."""
    cut = tiles(head_dim, dtype, capability)
    return cut if cut.rows < FEW_ROWS else Tiles(FEW_ROWS, 64 if head_dim <= 128 else 32, 4, cut.stages)


def sample_tiles(rows: int, head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> Tiles:
    """Return the tiles of a pass over a few rows, which reads every key once and so runs at the memory's speed."""
    if dtype == torch.float32 or capability < TENSOR_CORES:
        return Tiles(16, *PLAIN[padded_width(head_dim, 64)][1:])
    height = min(padded_width(rows, 16), SAMPLED_ROWS)
    if head_dim > 128:
        return Tiles(height, 32, 4, 2)
    tall = height > 32
    return Tiles(height, 128 if _large(capability) and not tall else 64, 8 if tall else 4, 3)


def masked_sample_tiles(
    rows: int, head_dim: int, dtype: torch.dtype, capability: tuple[int, int], banded: bool
) -> Tiles:
    """Return the tiles of a pass over a few rows behind a mask; on Hopper some are five times as slow as others.

    `banded`: what a row sees is near it, so that a tile of few rows leaves most keys out.
    """
    width = padded_width(head_dim, 64)
    if dtype == torch.float32 or not _large(capability) or width > 128:
        return sample_tiles(rows, head_dim, dtype, capability)
    if banded:
        return Tiles(16, 256, 4, 2)
    if width == 64:
        return Tiles(16, 256, 4, 2) if rows <= 16 else Tiles(32, 64, 4, 3)
    return Tiles(16, 128, 4, 3) if rows <= 32 else Tiles(64, 128, 8, 3)


def largest_tiles(head_dim: int, dtype: torch.dtype, capability: tuple[int, int], mask_by_row: bool) -> Tiles:
    """Return the tiles of a pass that looks for the largest score of every row."""
    if mask_by_row and dtype != torch.float32 and head_dim <= 128 and _large(capability):
        return Tiles(64, 64, 4, 3)
    return tiles(head_dim, dtype, capability)


def masked_tiles(head_dim: int, dtype: torch.dtype, capability: tuple[int, int], mask_by_row: bool) -> Tiles:
    """Return the tiles of a pass over every row behind a mask; what does not fit the registers is far slower.

    A mask of each row lies as the keys do where a tile has as many keys as a head is wide: nothing is moved then.
    """
    width = padded_width(head_dim, 64)
    if capability < TENSOR_CORES:
        return PLAIN[width]
    if mask_by_row and dtype != torch.float32 and width <= 128 and _large(capability):
        return Tiles(64, width, width // 16, 3 if width == 64 else 2)
    return Tiles(64, 32, 4, 1 if dtype == torch.float32 else 2 if width > 128 else 3)


def _large(capability: tuple[int, int]) -> bool:
    """Return True for Hopper and data-centre Blackwell, which have 227 KB of shared memory."""
    return capability[0] in (9, 10)
