"""Twins: training runs alike but for one thing, side by side; what `attnscale demo` shows."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from attnscale.diagnose import Audit
from attnscale.plain import plain
from attnscale.train.record import Record


@dataclass(frozen=True)
class TwinRun:
    """One of the runs: its loss, what a monitor recorded of it, and an audit of the model at its end."""

    name: str  # what sets it apart: "scaled by 1/√d_k"
    losses: tuple[tuple[int, float], ...]  # (step, loss)
    records: tuple[Record, ...] = ()
    audit: Audit | None = None
    received: tuple[tuple[float, float], ...] = ()  # (share of queries, quietest first; share of the gradient)
    held_out: float | None = None  # the loss on what no run trained on, at the end


@dataclass(frozen=True)
class Twins:
    """The runs, what was found, as one sentence composed from their numbers, and what explains it."""

    title: str
    verdict: str
    explanation: tuple[str, ...]  # paragraphs
    runs: tuple[TwinRun, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)  # how they were trained and measured

    def to_dict(self) -> dict[str, Any]:
        """The twins as JSON takes them; a loss that is not finite is None."""
        return {
            "title": self.title,
            "verdict": self.verdict,
            "explanation": list(self.explanation),
            "runs": [
                {
                    "name": run.name,
                    "losses": plain(run.losses),
                    "held_out": plain(run.held_out),
                    "received": plain(run.received),
                    "records": [record.to_dict() for record in run.records],
                    "findings": [asdict(finding) for finding in run.audit.findings] if run.audit is not None else [],
                }
                for run in self.runs
            ],
            "settings": dict(self.settings),
        }
