"""Two models, runs or saved checks -> what became of every head, and which of it is beyond its error."""

from attnscale.comparing.between import compare
from attnscale.comparing.comparison import Comparison, HeadChange, compare_portraits
from attnscale.comparing.moves import Move
from attnscale.comparing.portrait import LayerPortrait, Portrait

__all__ = ["Comparison", "HeadChange", "LayerPortrait", "Move", "Portrait", "compare", "compare_portraits"]
