"""Comparison: what became of every head between two portraits, and which of it is beyond its error."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from attnscale.comparing.moves import Move, judged, move_of
from attnscale.comparing.portrait import COMPARED, LayerPortrait, Portrait
from attnscale.diagnose import Change, Finding
from attnscale.errors import SettingError
from attnscale.plain import plain, printable

TOLERANCE = 0.01  # relative, or of a share: smaller moves are told as none, whatever their error
FACTORS = ("scale", "query_norm", "key_norm", "alignment")
UNPAIRED = "The inputs differ, so that the error of a change is that of both samples."


@dataclass(frozen=True)
class HeadChange:
    """One head: what moved, and whether it was the head itself or what reaches it."""

    layer: str
    head: int
    moves: Mapping[str, Move]
    made_alike: bool = False  # its queries and keys are made by the same parameters, as far as is known

    @property
    def carried(self) -> bool:
        """Whether it is made and scaled as before, so that what moved it is what reaches it."""
        return self.made_alike and not ("scale" in self.moves and self.moves["scale"].is_beyond)

    @property
    def changed(self) -> list[Move]:
        """What moved beyond its error, the most first."""
        return sorted((move for move in self.moves.values() if move.is_beyond), key=lambda move: -round(move.size, 3))

    @property
    def size(self) -> float:
        """How far it moved where it moved most, of what is beyond its error."""
        return max((move.size for move in self.changed), default=0.0)

    @property
    def worse(self) -> list[Move]:
        """What moved to its bad end, beyond its error."""
        return [move for move in self.changed if move.is_worse]

    @property
    def by_factor(self) -> Change:
        """Δ ln|s| = Δ ln a + Δ ln‖q‖ + Δ ln‖k‖ + Δ ln|cos|."""
        return Change(*(self.moves[name].change if name in self.moves else math.nan for name in FACTORS))

    @property
    def place(self) -> str:
        """The layer and the head."""
        return f"{self.layer}, head {self.head}"

    def __str__(self) -> str:
        told = "; ".join(str(move) for move in self.changed) or "nothing beyond its error"
        return printable(f"{self.place}: {told}")

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        moves = {name: move.to_dict() for name, move in self.moves.items()}
        return {"layer": self.layer, "head": self.head, "carried": self.carried, "moves": moves}


@dataclass(frozen=True)
class Comparison:
    """Two models, or two states of one, head by head."""

    before: str
    after: str
    heads: tuple[HeadChange, ...]
    came: tuple[Finding, ...]  # findings that the first did not have
    gone: tuple[Finding, ...]
    notes: tuple[str, ...] = ()  # what could not be compared, and how errors were told
    tolerance: float = TOLERANCE

    @cached_property
    def changed(self) -> tuple[HeadChange, ...]:
        """Heads that changed themselves, beyond their error, the most first."""
        return tuple(head for head in self._moved if not head.carried)

    @cached_property
    def carried(self) -> tuple[HeadChange, ...]:
        """Heads that are made as before, and moved with what reaches them, the most first."""
        return tuple(head for head in self._moved if head.carried)

    @property
    def worse(self) -> list[str]:
        """What got worse, a sentence each: warnings and errors that came, and heads beyond their error."""
        came = [str(finding) for finding in self.came if finding.severity != "note"]
        return came + [
            printable(f"{head.place}: {'; '.join(map(str, head.worse))}.") for head in self._moved if head.worse
        ]

    @property
    def conclusion(self) -> str:
        """The verdict in one sentence."""
        if not self.heads:
            return "Nothing to compare: the two have no layer in common."
        if not self._moved:
            said = f"No head of {len(self.heads)} changed beyond its error"
        elif not self.changed:
            said = f"No head changed itself; {_heads(len(self.carried))} moved with what reaches them"
        else:
            most = self.changed[0]
            own = "its" if len(self.changed) == 1 else "their"
            which = "" if len(self.changed) == 1 else "most of all "
            said = f"{_heads(len(self.changed))} of {len(self.heads)} changed beyond {own} error: "
            said += f"{which}{most.place}, {most.changed[0]}"
            said += f"; {_heads(len(self.carried))} more moved with what reaches them" if self.carried else ""
        found = [f"{len(each)} {word}" for word, each in (("came", self.came), ("went", self.gone)) if each]
        findings = f" Findings: {', '.join(found)}." if found else ""
        return f"{said}.{findings}"

    @cached_property
    def _moved(self) -> list[HeadChange]:
        return sorted((head for head in self.heads if head.changed), key=lambda head: -head.size)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON takes it: None where a number is not finite."""
        found: dict[str, Any] = plain(
            {
                "before": self.before,
                "after": self.after,
                "conclusion": self.conclusion,
                "tolerance": self.tolerance,
                "changed": [{"layer": head.layer, "head": head.head, "size": head.size} for head in self.changed],
                "carried": [{"layer": head.layer, "head": head.head, "size": head.size} for head in self.carried],
                "worse": self.worse,
                "came": [asdict(finding) for finding in self.came],
                "gone": [asdict(finding) for finding in self.gone],
                "notes": list(self.notes),
                "heads": [head.to_dict() for head in self.heads],
            }
        )
        return found

    def __str__(self) -> str:
        lines = [*map(str, self.changed), *(f"came: {each}" for each in self.came)]
        lines += [f"went: {each}" for each in self.gone]
        return "\n".join([*lines, *map(printable, self.notes), printable(self.conclusion)])


def require_tolerance(tolerance: float) -> None:
    """Refuse a tolerance below which nothing can be."""
    if not 0 <= tolerance < math.inf:
        raise SettingError(f"Expected a tolerance of at least 0, got {tolerance:g}.")


def compare_portraits(before: Portrait, after: Portrait, tolerance: float = TOLERANCE) -> Comparison:
    """Hold one portrait against another: heads by the names of their layers."""
    paired = bool(before.inputs) and before.inputs == after.inputs
    both = [name for name in before.layers if name in after.layers]
    alike = [name for name in both if before.layers[name].heads == after.layers[name].heads]
    heads = [head for name in alike for head in _heads_of(name, before.layers[name], after.layers[name], paired)]
    known, found = {_key(each): each for each in before.findings}, {_key(each): each for each in after.findings}
    return Comparison(
        before.title,
        after.title,
        tuple(judged(heads, tolerance)),
        tuple(each for key, each in found.items() if key not in known),
        tuple(each for key, each in known.items() if key not in found),
        tuple(dict.fromkeys((*before.notes, *after.notes, *_told(before, after, both, alike, paired)))),
        tolerance,
    )


def _heads_of(name: str, before: LayerPortrait, after: LayerPortrait, paired: bool) -> Iterator[HeadChange]:
    shared = [each for each in COMPARED if each in before.samples and each in after.samples]
    paired = paired and before.count == after.count
    for head in range(before.heads):
        moves = {
            each: move_of(each, before.samples[each][:, head], after.samples[each][:, head], paired) for each in shared
        }
        known = bool(before.made and after.made and before.made[head])
        yield HeadChange(name, head, moves, known and before.made[head] == after.made[head])


def _key(finding: Finding) -> tuple[str, int | None, str, str]:
    return finding.layer, finding.head, finding.code, finding.severity


def _told(before: Portrait, after: Portrait, both: list[str], alike: list[str], paired: bool) -> Iterator[str]:
    for one, other in ((before, after), (after, before)):
        alone = [name for name in one.layers if name not in other.layers]
        if alone:
            more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
            yield f"Only {one.title} has the layer {alone[0]}{more}, which is not compared."
    for name in both:
        if name not in alike:
            heads = f"{before.layers[name].heads} and {after.layers[name].heads} heads"
            yield f"The layer {name} has {heads}, and is not compared."
    if both and not paired:
        yield UNPAIRED


def _heads(number: int) -> str:
    return f"{number} head{'' if number == 1 else 's'}"
