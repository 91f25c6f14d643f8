"""Compare two profiles head by head, and find the changes that exceed their error."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from attnscale.comparing.profiles import COMPARED, LayerProfile, Profile
from attnscale.comparing.statistic_change import StatisticChange, mark_significant, statistic_change
from attnscale.diagnose import Change, Finding
from attnscale.errors import SettingError
from attnscale.plain import counted, plain, printable
from attnscale.results import Result

TOLERANCE = 0.01  # smaller changes are ignored: relative ones, and absolute ones of shares
FACTORS = ("scale_applied", "query_norm", "key_norm", "alignment")
UNPAIRED = "The inputs differ, so the error of a change includes the difference between the inputs."


@dataclass(frozen=True)
class HeadChange:
    """Changes of one head, and their origin: the head itself or its inputs."""

    layer: str
    head: int
    moves: Mapping[str, StatisticChange]
    same_parameters: bool = False  # True if the attention module has equal parameters on both sides
    sees_others: bool = False  # True if the mask changed: for the same inputs, queries see other keys

    @property
    def carried(self) -> bool:
        """True if weights, scale and visible keys are equal, so the change comes from the inputs."""
        rescaled = "scale_applied" in self.moves and self.moves["scale_applied"].is_significant
        return self.same_parameters and not rescaled and not self.sees_others

    @property
    def changed(self) -> list[StatisticChange]:
        """Significant changes, largest first."""
        return sorted(
            (move for move in self.moves.values() if move.is_significant), key=lambda move: -round(move.size, 3)
        )

    @property
    def size(self) -> float:
        """Size of its largest significant change."""
        return max((move.size for move in self.changed), default=0.0)

    @property
    def worse(self) -> list[StatisticChange]:
        """Significant changes for the worse."""
        return [move for move in self.changed if move.is_worse]

    @property
    def by_factor(self) -> Change:
        """Δ ln|s| = Δ ln a + Δ ln‖q‖ + Δ ln‖k‖ + Δ ln|cos|."""
        return Change(*(self.moves[name].change if name in self.moves else math.nan for name in FACTORS))

    @property
    def place(self) -> str:
        """Layer and head."""
        return f"{self.layer}, head {self.head}"

    @property
    def reason(self) -> str:
        """Origin of the change: the mask, the inputs, or weights and scale of the head."""
        return "its mask" if self.sees_others else "its inputs" if self.carried else "weights or scale"

    @property
    def text(self) -> str:
        """Description of the changes, largest first."""
        changes = [*(["its queries see other keys"] if self.sees_others else []), *map(str, self.changed)]
        return "; ".join(changes) or "no change larger than its error"

    def __str__(self) -> str:
        return printable(f"{self.place}: {self.text}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        moves = {name: move.to_dict() for name, move in self.moves.items()}
        place = {"layer": self.layer, "head": self.head}
        return {**place, "carried": self.carried, "sees_others": self.sees_others, "moves": moves}


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """Comparison of two models, or two states of one model, head by head."""

    before: str
    after: str
    heads: tuple[HeadChange, ...]
    new: tuple[Finding, ...]  # findings of the second side only
    gone: tuple[Finding, ...]  # findings of the first side only
    notes: tuple[str, ...] = ()  # on parts that could not be compared, and on errors
    tolerance: float = TOLERANCE

    @cached_property
    def changed(self) -> tuple[HeadChange, ...]:
        """Heads with changes of their own weights, scale or mask, largest change first."""
        return tuple(head for head in self._changed_heads if not head.carried)

    @cached_property
    def carried(self) -> tuple[HeadChange, ...]:
        """Heads that changed only because their inputs changed, largest change first."""
        return tuple(head for head in self._changed_heads if head.carried)

    @property
    def worse(self) -> list[str]:
        """Return sentences about new warnings and errors, and about heads that got significantly worse."""
        new = [str(finding) for finding in self.new if finding.severity != "note"]
        return new + [
            printable(f"{head.place}: {'; '.join(map(str, head.worse))}.") for head in self._changed_heads if head.worse
        ]

    @property
    def is_compared(self) -> bool:
        """True if the two sides have a layer in common."""
        return bool(self.heads)

    @property
    def conclusion(self) -> str:
        """Verdict in one sentence."""
        if not self.is_compared:
            return "Nothing to compare: the two have no layer in common."
        if not self._changed_heads:
            verdict = f"No head of {len(self.heads)} changed by more than its error"
        elif not self.changed:
            verdict = f"No head's own weights changed; the inputs of {counted(len(self.carried), 'head')} did"
        else:
            most = self.changed[0]
            error = "its error" if len(self.changed) == 1 else "their error, most of all"
            verdict = f"{len(self.changed)} of {counted(len(self.heads), 'head')} changed by more than {error}: "
            verdict += f"{most.place}, {most.text.split('; ')[0]}"
            verdict += f"; the inputs of {counted(len(self.carried), 'head')} changed too" if self.carried else ""
        new = f" {counted(len(self.new), 'new finding')}." if self.new else ""
        gone = f" {counted(len(self.gone), 'finding')} gone." if self.gone else ""
        return f"{verdict}.{new}{gone}"

    @cached_property
    def _changed_heads(self) -> list[HeadChange]:
        return sorted((head for head in self.heads if head.changed or head.sees_others), key=lambda head: -head.size)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, with None for NaN and infinite numbers."""
        found: dict[str, Any] = plain(
            {
                "before": self.before,
                "after": self.after,
                "conclusion": self.conclusion,
                "tolerance": self.tolerance,
                "changed": [{"layer": head.layer, "head": head.head, "size": head.size} for head in self.changed],
                "carried": [{"layer": head.layer, "head": head.head, "size": head.size} for head in self.carried],
                "worse": self.worse,
                "new": [asdict(finding) for finding in self.new],
                "gone": [asdict(finding) for finding in self.gone],
                "notes": list(self.notes),
                "heads": [head.to_dict() for head in self.heads],
            }
        )
        return found

    def __str__(self) -> str:
        lines = [*map(str, self.changed), *(f"new: {each}" for each in self.new)]
        lines += [f"gone: {each}" for each in self.gone]
        return "\n".join([*lines, *map(printable, self.notes), printable(self.conclusion)])


def require_tolerance(tolerance: float) -> None:
    """Raise an error for a negative or infinite tolerance."""
    if not 0 <= tolerance < math.inf:
        raise SettingError(f"Expected a tolerance of at least 0, got {tolerance:g}.")


def compare_profiles(before: Profile, after: Profile, tolerance: float = TOLERANCE) -> Comparison:
    """Compare two profiles; match heads by the names of their layers."""
    paired = bool(before.inputs) and before.inputs == after.inputs
    both = [name for name in before.layers if name in after.layers]
    alike = [name for name in both if before.layers[name].heads == after.layers[name].heads]
    heads = [head for name in alike for head in _heads_of(name, before.layers[name], after.layers[name], paired)]
    old, new = ({_key(each): each for each in side.findings} for side in (before, after))
    return Comparison(
        before.title,
        after.title,
        tuple(mark_significant(heads, tolerance)),
        tuple(each for key, each in new.items() if key not in old),
        tuple(each for key, each in old.items() if key not in new),
        tuple(dict.fromkeys((*before.notes, *after.notes, *_notes(before, after, both, alike, paired)))),
        tolerance,
    )


def _heads_of(name: str, before: LayerProfile, after: LayerProfile, paired: bool) -> Iterator[HeadChange]:
    shared = [each for each in COMPARED if each in before.samples and each in after.samples]
    same_parameters = bool(before.weights) and before.weights == after.weights
    sees_others = paired and bool(before.visible and after.visible) and before.visible != after.visible
    paired = paired and before.count == after.count
    for head in range(before.heads):
        moves = {
            each: statistic_change(each, before.samples[each][:, head], after.samples[each][:, head], paired)
            for each in shared
        }
        yield HeadChange(name, head, moves, same_parameters, sees_others)


def _key(finding: Finding) -> tuple[str, int | None, str, str]:
    return finding.layer, finding.head, finding.code, finding.severity


def _notes(before: Profile, after: Profile, both: list[str], alike: list[str], paired: bool) -> Iterator[str]:
    for one, other in ((before, after), (after, before)):
        alone = [name for name in one.layers if name not in other.layers]
        if alone:
            yield f"Only {one.title} has the layer {and_more(alone)}, which is not compared."
    for name in both:
        if name not in alike:
            heads = f"{before.layers[name].heads} and {after.layers[name].heads} heads"
            yield f"The layer {name} has {heads}, and is not compared."
    if both and not paired:
        yield UNPAIRED


def and_more(names: list[str]) -> str:
    """Return the first name, and the number of others."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
