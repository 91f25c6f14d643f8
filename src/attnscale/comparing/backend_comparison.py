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
    """One thing in which a layer differs from the first backend."""

    what: str  # "scale", "soft-cap", "visible keys", "sinks" or "output"
    message: str


@dataclass(frozen=True)
class BackendLayer:
    """One layer as one backend computed it; changes are relative to the first backend, NaN where not known."""

    layer: str
    backend: str
    kind: str
    scale: float
    softcap: float | None
    keys: float  # visible to a query, on average
    sinks: float | None  # the highest score that stands beside the keys
    input_change: float
    output_change: float
    differences: tuple[BackendDifference, ...] = ()

    @property
    def words(self) -> str:
        """The things in which it differs, each once."""
        return ", ".join(dict.fromkeys(each.what for each in self.differences))

    def __str__(self) -> str:
        return printable(f"{self.layer}: {self.backend}: {'; '.join(each.message for each in self.differences)}.")


@dataclass(frozen=True, repr=False)
class BackendComparison(Result):
    """The attention layers of one model under several backends; the first that ran is what others are compared with."""

    backends: tuple[str, ...]  # that ran
    unavailable: Mapping[str, str]  # backends that did not run, and the reason
    rows: tuple[BackendLayer, ...]  # layer by layer, in the order they ran
    notes: tuple[str, ...] = ()
    title: str = "the model"
    fed: str = "the batch given"  # a description of the input

    @property
    def differing(self) -> tuple[BackendLayer, ...]:
        """Layers that differ by themselves, in the order they ran; not those that inherit other inputs."""
        return tuple(row for row in self.rows if row.differences)

    @property
    def first(self) -> BackendLayer | None:
        """The first layer that differs; None where all agree."""
        return next(iter(self.differing), None)

    @property
    def is_compared(self) -> bool:
        """True if at least two backends ran and have a layer in common."""
        return len({row.backend for row in self.rows}) > 1

    @property
    def conclusion(self) -> str:
        """The verdict in one sentence."""
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
        said = f"{_names(wrong)} {'differs' if len(wrong) == 1 else 'differ'} from {first} in {where} of {layers}"
        said += f", first in {self.first.layer} ({self.first.words})"
        return f"{said}; {_names(agreeing)} {'agrees' if len(agreeing) == 1 else 'agree'}." if agreeing else f"{said}."

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON takes it: None for a number that is not finite."""
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
        """Return the lines of the table, under HEADINGS."""
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
        """A sentence for each backend that did not run, and the notes."""
        return (*(f"{name} did not run: {why}." for name, why in self.unavailable.items()), *self.notes)

    def __str__(self) -> str:
        lines = [HEADINGS, *([printable(cell) for cell in row] for row in self.cells())]
        widths = [max(len(line[at]) for line in lines) for at in range(len(HEADINGS))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        shown = [line.rstrip() for line in table] if self.rows else []
        return "\n".join([*shown, *map(str, self.differing), *map(printable, self.remarks), printable(self.conclusion)])


def _names(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
