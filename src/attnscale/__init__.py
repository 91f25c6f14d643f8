"""attnscale keeps attention scores in range."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnscale import reference, rules, theory, train
    from attnscale.acting import ClipReport, calibrate_, clip_qk_, rescale_
    from attnscale.comparing import compare, compare_backends
    from attnscale.diagnose import Finding, audit, what_if
    from attnscale.errors import AttnscaleError
    from attnscale.measure import (
        ScoreMoments,
        ScoreStats,
        attention_varlen_with_stats,
        attention_with_stats,
        score_moments,
        score_stats,
    )
    from attnscale.modules import MultiheadAttention
    from attnscale.operator import attention, attention_varlen, attention_weights
    from attnscale.train import Monitor, QKClip
    from attnscale.visibility import Visibility
    from attnscale.watching import watch

__version__ = "0.1.0"
__all__ = [
    "AttnscaleError",
    "ClipReport",
    "Finding",
    "Monitor",
    "MultiheadAttention",
    "QKClip",
    "ScoreMoments",
    "ScoreStats",
    "Visibility",
    "attention",
    "attention_varlen",
    "attention_varlen_with_stats",
    "attention_weights",
    "attention_with_stats",
    "audit",
    "calibrate_",
    "clip_qk_",
    "compare",
    "compare_backends",
    "reference",
    "rescale_",
    "rules",
    "score_moments",
    "score_stats",
    "theory",
    "train",
    "watch",
    "what_if",
]

# Loaded when first used, so that the command line answers without importing torch.
_HOME = {
    "AttnscaleError": "attnscale.errors",
    "MultiheadAttention": "attnscale.modules",
    "Visibility": "attnscale.visibility",
    "attention": "attnscale.operator",
    "attention_varlen": "attnscale.operator",
    "attention_weights": "attnscale.operator",
    "ScoreMoments": "attnscale.measure",
    "ScoreStats": "attnscale.measure",
    "attention_varlen_with_stats": "attnscale.measure",
    "attention_with_stats": "attnscale.measure",
    "score_moments": "attnscale.measure",
    "score_stats": "attnscale.measure",
    "watch": "attnscale.watching",
    "Finding": "attnscale.diagnose",
    "audit": "attnscale.diagnose",
    "what_if": "attnscale.diagnose",
    "ClipReport": "attnscale.acting",
    "calibrate_": "attnscale.acting",
    "clip_qk_": "attnscale.acting",
    "rescale_": "attnscale.acting",
    "compare": "attnscale.comparing",
    "compare_backends": "attnscale.comparing",
    "Monitor": "attnscale.train",
    "QKClip": "attnscale.train",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'attnscale' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name) if name in _HOME else import_module(f"attnscale.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
