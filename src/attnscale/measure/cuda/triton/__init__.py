"""Triton: passes over rows that leave the sums of their scores behind, and kernels that make statistics of them."""

from attnscale.measure.cuda.triton.finish import finish_rows, finish_sampled
from attnscale.measure.cuda.triton.launch import capability
from attnscale.measure.cuda.triton.lengths import head_lengths, lengths_of_both, mean_lengths
from attnscale.measure.cuda.triton.masked_rows import longest_squared, raise_largest_, score_masked_rows
from attnscale.measure.cuda.triton.rows import attend_rows, score_rows
from attnscale.measure.cuda.triton.sampled_rows import sample_rows
from attnscale.measure.cuda.triton.tiles import Tiles, decoding_tiles, sample_tiles, tiles

__all__ = [
    "Tiles",
    "attend_rows",
    "capability",
    "decoding_tiles",
    "finish_rows",
    "finish_sampled",
    "head_lengths",
    "lengths_of_both",
    "longest_squared",
    "mean_lengths",
    "raise_largest_",
    "sample_rows",
    "sample_tiles",
    "score_masked_rows",
    "score_rows",
    "tiles",
]
