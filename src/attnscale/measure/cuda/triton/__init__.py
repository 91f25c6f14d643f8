"""Triton: attention that leaves exact statistics of its scores behind, and passes for the statistics alone."""

from attnscale.measure.cuda.triton.launch import attend_rows, fill, sample_rows, score_rows
from attnscale.measure.cuda.triton.tiles import DTYPES, WIDEST, Tiles, sample_tiles, tiles

__all__ = [
    "DTYPES",
    "WIDEST",
    "Tiles",
    "attend_rows",
    "fill",
    "sample_rows",
    "sample_tiles",
    "score_rows",
    "tiles",
]
