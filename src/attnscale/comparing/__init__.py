"""Comparing two models, runs or saved checks, head by head; and the attention implementations of one model."""

from attnscale.comparing.backend_comparison import BackendComparison
from attnscale.comparing.backends import compare_backends
from attnscale.comparing.comparison import Comparison, HeadChange, compare_portraits
from attnscale.comparing.moves import Move
from attnscale.comparing.portrait import LayerPortrait, Portrait
from attnscale.comparing.sides import compare

__all__ = [
    "BackendComparison",
    "Comparison",
    "HeadChange",
    "LayerPortrait",
    "Move",
    "Portrait",
    "compare",
    "compare_backends",
    "compare_portraits",
]
