"""Compare two models, runs or saved checks head by head, and compare the attention implementations of one model."""

from attnscale.comparing.backend_comparison import BackendComparison
from attnscale.comparing.backends import compare_backends
from attnscale.comparing.comparison import Comparison, HeadChange, compare_profiles
from attnscale.comparing.profiles import LayerProfile, Profile
from attnscale.comparing.sides import compare
from attnscale.comparing.statistic_change import StatisticChange

__all__ = [
    "BackendComparison",
    "Comparison",
    "HeadChange",
    "LayerProfile",
    "Profile",
    "StatisticChange",
    "compare",
    "compare_backends",
    "compare_profiles",
]
