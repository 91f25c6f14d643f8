"""A model in training -> records of its scores, alarms, and where they are going; callbacks for training loops."""

from typing import TYPE_CHECKING, Any

from attnscale.train.log import Log, read_log
from attnscale.train.monitor import Monitor
from attnscale.train.qk_clip import QKClip
from attnscale.train.record import LayerRecord, Record
from attnscale.train.run import LayerRun, Run, summarise
from attnscale.train.sinks.jsonlines import JsonLines

if TYPE_CHECKING:
    from attnscale.train.huggingface import ScoreCallback
    from attnscale.train.lightning import LightningScoreCallback

__all__ = [
    "JsonLines",
    "LayerRecord",
    "LayerRun",
    "LightningScoreCallback",
    "Log",
    "Monitor",
    "QKClip",
    "Record",
    "Run",
    "ScoreCallback",
    "read_log",
    "summarise",
]


def __getattr__(name: str) -> Any:
    """The callbacks, which import what they are for, when they are asked for."""
    if name == "ScoreCallback":
        from attnscale.train.huggingface import ScoreCallback

        return ScoreCallback
    if name == "LightningScoreCallback":
        from attnscale.train.lightning import LightningScoreCallback

        return LightningScoreCallback
    raise AttributeError(f"module 'attnscale.train' has no attribute {name!r}")
