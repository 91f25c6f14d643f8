"""Triton: attention that leaves exact statistics of its scores behind, and passes for the statistics alone."""

from attnscale.measure.cuda.triton.finishing import finish_sampled, finish_scored
from attnscale.measure.cuda.triton.launch import attend_rows, fill, sample_rows, score_rows, sequence_rows
from attnscale.measure.cuda.triton.launching import capability
from attnscale.measure.cuda.triton.lengths import head_lengths, lengths_of_both, mean_lengths
from attnscale.measure.cuda.triton.showing import longest_squared, raise_largest_, shown_rows
from attnscale.measure.cuda.triton.tiles import WIDEST, Tiles, few_tiles, sample_tiles, tiles

__all__ = [
    "WIDEST",
    "Tiles",
    "attend_rows",
    "capability",
    "few_tiles",
    "fill",
    "finish_sampled",
    "finish_scored",
    "head_lengths",
    "lengths_of_both",
    "longest_squared",
    "mean_lengths",
    "raise_largest_",
    "sample_rows",
    "sample_tiles",
    "score_rows",
    "sequence_rows",
    "shown_rows",
    "tiles",
]
