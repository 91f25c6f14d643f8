"""Monitoring of a model in training: records, alarms and forecasts of its scores, QK-Clip, and trainer callbacks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnscale.train.log import Log, read_log
from attnscale.train.monitor import Monitor
from attnscale.train.qk_clip import QKClip
from attnscale.train.record import LayerRecord, Record
from attnscale.train.run import LayerRun, Run, summarise
from attnscale.train.sinks import JsonLines

if TYPE_CHECKING:
    from attnscale.train.huggingface import QKClipCallback, ScoreCallback
    from attnscale.train.lightning import LightningQKClipCallback, LightningScoreCallback

__all__ = [
    "JsonLines",
    "LayerRecord",
    "LayerRun",
    "LightningQKClipCallback",
    "LightningScoreCallback",
    "Log",
    "Monitor",
    "QKClip",
    "QKClipCallback",
    "Record",
    "Run",
    "ScoreCallback",
    "read_log",
    "summarise",
]


_CALLBACKS = {
    "ScoreCallback": "huggingface",
    "QKClipCallback": "huggingface",
    "LightningScoreCallback": "lightning",
    "LightningQKClipCallback": "lightning",
}


def __getattr__(name: str) -> Any:
    """Import a callback and its trainer's package on first use."""
    if name in _CALLBACKS:
        return getattr(import_module(f"attnscale.train.{_CALLBACKS[name]}"), name)
    raise AttributeError(f"module 'attnscale.train' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
