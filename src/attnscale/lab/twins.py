"""Twins: training runs alike but for one thing, side by side; what `attnscale demo` shows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnscale.diagnose import Audit
from attnscale.train.record import Record


@dataclass(frozen=True)
class TwinRun:
    """One of the runs: its loss, what a monitor recorded of it, and an audit of the model at its end."""

    name: str  # what sets it apart: "scaled by 1/√d_k"
    losses: tuple[tuple[int, float], ...]  # (step, loss)
    records: tuple[Record, ...] = ()
    audit: Audit | None = None


@dataclass(frozen=True)
class Twins:
    """The runs, what was found, as one sentence composed from their numbers, and what explains it."""

    title: str
    verdict: str
    explanation: tuple[str, ...]  # paragraphs
    runs: tuple[TwinRun, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)  # how they were trained and measured
