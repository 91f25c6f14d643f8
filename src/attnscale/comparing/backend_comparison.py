"""The result of compare_backends(): the layers of one model under several attention implementations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attnscale.plain import counted, plain, printable, readable
from attnscale.results import Result

HEADINGS = ("layer", "backend", "scale", "soft-cap", "keys", "sinks", "output change", "differs in")


@dataclass(frozen=True)
class BackendDifference:
    """One difference of a layer from the first backend."""

    what: str  # "scale", "soft-cap", "visible keys", "sinks" or "output"
    message: str


@dataclass(frozen=True)
class BackendLayer:
    """One layer under one backend; changes are relative to the first backend, or NaN if unknown."""

    layer: str
    backend: str
    kind: str
    scale: float
    softcap: float | None
    keys: float  # mean number of visible keys per query
    sinks: float | None  # largest sink score; None without sinks
    input_change: float = 0.0
    output_change: float = 0.0
    differences: tuple[BackendDifference, ...] = ()

    @property
    def words(self) -> str:
        """Names of the differences, without duplicates."""
        return ", ".join(dict.fromkeys(each.what for each in self.differences))

    def __str__(self) -> str:
        return printable(f"{self.layer}: {self.backend}: {'; '.join(each.message for each in self.differences)}.")


@dataclass(frozen=True, repr=False)
class BackendComparison(Result):
    """Attention layers of one model under several backends, compared with the first backend that ran."""

    backends: tuple[str, ...]  # backends that ran
    unavailable: Mapping[str, str]  # backends that did not run, and the reason
    rows: tuple[BackendLayer, ...]  # by layer, in execution order
    notes: tuple[str, ...] = ()
    title: str = "the model"
    fed: str = "the batch given"  # description of the input

    @property
    def differing(self) -> tuple[BackendLayer, ...]:
        """Layers with a difference of their own, in execution order; layers with different inputs are excluded."""
        return tuple(row for row in self.rows if row.differences)

    @property
    def first(self) -> BackendLayer | None:
        """First layer that differs; None if all agree."""
        return next(iter(self.differing), None)

    @property
    def is_compared(self) -> bool:
        """True if at least two backends ran and have a layer in common."""
        return len({row.backend for row in self.rows}) > 1

    @property
    def conclusion(self) -> str:
        """Verdict in one sentence."""
        if not self.is_compared:
            ran = f"only {self.backends[0]} ran" if len(self.backends) == 1 else "no backend ran"
            return f"Nothing was compared: {'no layer is common to the backends' if len(self.backends) > 1 else ran}."
        first, *others = self.backends
        layers = counted(len({row.layer for row in self.rows}), "layer")
        if self.first is None:
            changes = [row.output_change for row in self.rows if math.isfinite(row.output_change)]
            most = f"; outputs differ by at most {max(changes):.1g} of their norm" if changes else ""
            return f"{_names(others)} {'agrees' if len(others) == 1 else 'agree'} with {first} in {layers}{most}."
        wrong = [name for name in others if any(row.backend == name for row in self.differing)]
        agreeing = [name for name in others if name not in wrong]
        where = len({row.layer for row in self.differing})
        sentence = f"{_names(wrong)} {'differs' if len(wrong) == 1 else 'differ'} from {first} in {where} of {layers}"
        sentence += f", first in {self.first.layer} ({self.first.words})"
        return (
            f"{sentence}; {_names(agreeing)} {'agrees' if len(agreeing) == 1 else 'agree'}."
            if agreeing
            else f"{sentence}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, with None for NaN and infinite numbers."""
        found: dict[str, Any] = plain(
            {
                "model": self.title,
                "input": self.fed,
                "backends": self.backends,
                "unavailable": dict(self.unavailable),
                "conclusion": self.conclusion,
                "first": None if self.first is None else asdict(self.first),
                "layers": [asdict(row) for row in self.rows],
                "notes": self.notes,
            }
        )
        return found

    def cells(self) -> list[tuple[str, ...]]:
        """Return the rows of the table, with the columns of HEADINGS."""
        return [
            (
                row.layer,
                row.backend,
                readable(row.scale),
                "–" if row.softcap is None else f"{row.softcap:g}",
                f"{row.keys:.2f}",
                "–" if row.sinks is None else readable(row.sinks),
                "–" if row.backend == self.backends[0] or math.isnan(row.output_change) else f"{row.output_change:.1g}",
                row.words or "–",
            )
            for row in self.rows
        ]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences about backends that did not run, followed by the notes."""
        return (*(f"{name} did not run: {why}." for name, why in self.unavailable.items()), *self.notes)

    def __str__(self) -> str:
        lines = [HEADINGS, *([printable(cell) for cell in row] for row in self.cells())]
        widths = [max(len(line[at]) for line in lines) for at in range(len(HEADINGS))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        shown = [line.rstrip() for line in table] if self.rows else []
        return "\n".join([*shown, *map(str, self.differing), *map(printable, self.remarks), printable(self.conclusion)])


def _names(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
