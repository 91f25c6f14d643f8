"""Checked: everything `attnscale check` has to say; text, JSON and HTML render the same object."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attnscale.checking.line import MEANINGS, Line, line_of
from attnscale.diagnose import CODES, SEVERITIES, Audit, WhatIf
from attnscale.diagnose.audit import NOTHING_READ
from attnscale.diagnose.finding import Group, grouped
from attnscale.plain import plain

WHAT_IF_ROWS = 256  # looked at per head and candidate: enough for a table, quick at any length


@dataclass(frozen=True)
class Checked:
    """A model, what it was run on, and the audit of that run."""

    title: str
    fed: str
    device: str
    rows: int | None  # looked at per head; None: all
    notes: tuple[str, ...]
    audit: Audit
    asked: str | None = None  # the layer to try other scales on, where one was named

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """The table: one line a layer, in the order they ran."""
        findings = self.audit.findings
        return tuple(
            line_of(layer, [finding for finding in findings if finding.layer == name])
            for name, layer in self.audit.layers.items()
        )

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The findings, those that say the same put together, the worst first."""
        return grouped(self.audit.findings)

    @property
    def footnotes(self) -> dict[str, str]:
        """What the verdicts mean that are neither `healthy` nor a finding."""
        words = {line.verdict for line in self.lines}
        return {word: meaning for word, meaning in MEANINGS.items() if word in words}

    @property
    def has_errors(self) -> bool:
        """Whether anything found is of severity error."""
        return self.audit.worst == "error"

    @cached_property
    def focus(self) -> str | None:
        """The layer to try other scales on: the one named, else the one found worst, else that of the widest spread."""
        if self.asked is not None:
            return self.asked
        finite = [line for line in self.lines if math.isfinite(line.spread) and math.isfinite(line.scale)]
        finite = [line for line in finite if self.audit.layers[line.name].kept]
        if not finite:
            return None
        named = {line.name for line in finite}
        blamed = (group.first.layer for group in self.groups if group.first.layer in named)
        return next(blamed, max(finite, key=lambda line: line.spread).name)

    @cached_property
    def what_if(self) -> WhatIf | None:
        """What every rule would do to the layer in focus."""
        return None if self.focus is None else self.audit.what_if(self.focus, rows=WHAT_IF_ROWS)

    @property
    def conclusion(self) -> str:
        """The verdict in one sentence."""
        if not self.lines:
            return NOTHING_READ
        counts = Counter(finding.severity for finding in self.audit.findings)
        if not counts["error"] and not counts["warning"]:
            unsure = sum(line.heads_by_verdict.get("uncertain", 0) for line in self.lines)
            more = _also(counts["note"], "note") + _also(unsure, "uncertain head")
            return f"{self._nothing_wrong}: {self._summary}{more}."
        worst = self.groups[0]
        known = CODES.get(worst.first.code, worst.first.message.rstrip("."))
        start = "Not fine" if counts["error"] else "No errors, but a warning"
        left = [_count(counts[name], name) for name in reversed(SEVERITIES) if counts[name]]
        return f"{start}: in {worst.where(len(self.lines))}, {known} ({', '.join(left)} in all)."

    @property
    def _nothing_wrong(self) -> str:
        if self.audit.unjudged:
            return "Cannot tell"
        past = 0 if self.audit.trained else self.audit.past_freezing
        return f"No warnings, but {_count(past, 'head')} past the freezing point from the start" if past else "Fine"

    @property
    def _summary(self) -> str:
        spreads = [line.spread for line in self.lines if math.isfinite(line.spread)]
        bounds = dict.fromkeys(_told(bound) for bound in (min(spreads), max(spreads))) if spreads else ["nothing"]
        state = "trained" if self.audit.trained else "at initialisation"
        return f"{_count(len(self.lines), 'attention layer')}, {state}, scores spread by {' to '.join(bounds)}"

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON takes it: None where a number is not finite."""
        audit = self.audit.to_dict()
        layers = {line.name: audit["layers"][line.name] | line.to_dict() for line in self.lines}
        tried = None if self.asked is None or self.what_if is None else self.what_if.to_dict()["rows"]
        found: dict[str, Any] = plain(
            {
                "model": self.title,
                "input": self.fed,
                "device": self.device,
                "rows": self.rows,
                "notes": list(self.notes),
                "conclusion": self.conclusion,
                **audit,
                "layers": layers,
                "what_if": None if tried is None else {"layer": self.asked, "rows": tried},
            }
        )
        return found


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _also(number: int, what: str) -> str:
    return f"; {_count(number, what)}" if number else ""


def _told(value: float) -> str:
    """Two digits, without a power of ten where a person needs none.

    >>> _told(1.83), _told(112.4), _told(2.1e7)
    ('1.8', '110', '2.1e+07')
    """
    return f"{float(f'{value:.2g}'):,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.2g}"
