"""Comparing two models, runs or saved checks, head by head: changes that are larger than their error."""

from attnscale.comparing.comparison import Comparison, HeadChange, compare_portraits
from attnscale.comparing.moves import Move
from attnscale.comparing.portrait import LayerPortrait, Portrait
from attnscale.comparing.sides import compare

__all__ = ["Comparison", "HeadChange", "LayerPortrait", "Move", "Portrait", "compare", "compare_portraits"]
