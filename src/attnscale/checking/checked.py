"""The work of `attnscale check`: load, watch, diagnose; text, JSON and HTML render the one object it returns."""

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from attnscale.diagnose import CODES, SEVERITIES, Audit, Finding, WhatIf, audited
from attnscale.diagnose.auditing import NOTHING_READ
from attnscale.diagnose.finding import Group, grouped, severity_rank
from attnscale.diagnose.verdict import head_verdicts, verdict_text, verdict_word
from attnscale.errors import NotFollowedWarning
from attnscale.loading import Loaded, Request, load_model, offline
from attnscale.loading.hub import download
from attnscale.loading.model_errors import as_model_error, quiet
from attnscale.measure.statistics import Place, in_place
from attnscale.plain import counted, plain, readable
from attnscale.watching import Layer

WHAT_IF_ROWS = 256  # per head and candidate: enough for a table, quick at any length
MEANINGS = {
    "sharp": "a few keys take most of the weight",
    "diluted": "the weights of a row are nearly equal, as small initial projections leave them",
    "uncertain": "too few rows were sampled for a verdict; sample more (--rows)",
}
NORMAL_IF_TRAINED = "sharp"
# Shares of unknown tokens: above the first it is noted, above the second the scores of a trained model are not judged.
NOTED_UNKNOWN, MAX_UNKNOWN = 0.05, 0.30


@dataclass(frozen=True)
class Line:
    """One layer of the table, as the mean of its heads; NaN without a finite value."""

    name: str
    heads: int
    head_dim: int
    statistics: Mapping[str, float]  # those of Place.CHECK
    errors: Mapping[str, float]  # their standard errors, if rows were sampled
    spread_expected: float  # of independent queries and keys of these norms, multiplied by the expected scale
    scale_applied: float
    scale_expected: float
    verdict: str  # the code of the worst warning or error in the layer, else the state of its heads
    verdict_text: str  # for people: with the heads it is about, and `healthy` where it is normal
    heads_by_verdict: Mapping[str, int]
    severity: str | None  # of the worst finding in the layer
    code: str | None  # of that finding

    @property
    def spread(self) -> float:
        """Spread of the scores."""
        return self.statistics["spread"]

    def to_dict(self) -> dict[str, Any]:
        """Return the line as one flat table of plain values."""
        flat = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "statistics"}
        flat |= {"errors": dict(self.errors), "heads_by_verdict": dict(self.heads_by_verdict)}
        return flat | dict(self.statistics)


def line_of(layer: Layer, findings: list[Finding], trained: bool = False) -> Line:
    """Return the line of a layer; `findings` are those about it, `trained` says of its model."""
    worst = max(findings, key=lambda finding: severity_rank(finding.severity), default=None)
    shown = in_place(Place.CHECK)
    norms = float((layer.query_norm.double() * layer.key_norm.double()).nanmean())
    return Line(
        name=layer.name,
        heads=layer.heads,
        head_dim=layer.head_dim,
        statistics={entry.name: entry.whole(layer.stats) for entry in shown},
        errors={entry.name: error for entry in shown if not math.isnan(error := entry.error(layer.stats))},
        spread_expected=abs(layer.scale_expected) * norms / math.sqrt(layer.head_dim),
        scale_applied=layer.scale_applied,
        scale_expected=layer.scale_expected,
        verdict=verdict_word(layer, findings),
        verdict_text=verdict_text(layer, findings, trained),
        heads_by_verdict=Counter(head.verdict for head in head_verdicts(layer)),
        severity=None if worst is None else worst.severity,
        code=None if worst is None else worst.code,
    )


@dataclass(frozen=True)
class Checked:
    """A model, the input it was run on, and the audit of that run."""

    title: str
    fed: str  # a description of the input
    device: str
    rows: int | None  # sampled per head; None: all
    notes: tuple[str, ...]
    audit: Audit
    asked: str | None = None  # the layer that --what-if names

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """The lines of the table, one per layer, in the order they ran."""
        findings = self.audit.findings
        return tuple(
            line_of(layer, [finding for finding in findings if finding.layer == name], self.audit.trained)
            for name, layer in self.audit.layers.items()
        )

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Findings grouped by their message, the worst first."""
        return grouped(self.audit.findings)

    @property
    def footnotes(self) -> dict[str, str]:
        """Meanings of the verdicts in the table that are neither `healthy` nor a finding."""
        words = {line.verdict for line in self.lines}
        found = {word: meaning for word, meaning in MEANINGS.items() if word in words}
        if self.audit.trained and NORMAL_IF_TRAINED in found:
            found[NORMAL_IF_TRAINED] += ", which is normal in a trained model"
        return found

    @property
    def has_errors(self) -> bool:
        """True if any finding is of severity error."""
        return self.audit.worst == "error"

    @cached_property
    def focus(self) -> str | None:
        """The layer to try other scales on: the one named, else the worst, else the one of the widest spread."""
        if self.asked is not None:
            return self.asked
        finite = [line for line in self.lines if math.isfinite(line.spread) and math.isfinite(line.scale_applied)]
        finite = [line for line in finite if self.audit.layers[line.name].kept]
        if not finite:
            return None
        names = {line.name for line in finite}
        worst = (group.first.layer for group in self.groups if group.first.layer in names)
        return next(worst, max(finite, key=lambda line: line.spread).name)

    @cached_property
    def what_if(self) -> WhatIf | None:
        """The effect of every rule on the layer in focus."""
        return None if self.focus is None else self.audit.what_if(self.focus, rows=WHAT_IF_ROWS)

    @property
    def conclusion(self) -> str:
        """The verdict in one sentence."""
        if not self.lines:
            return NOTHING_READ
        counts = Counter(finding.severity for finding in self.audit.findings)
        if not counts["error"] and not counts["warning"]:
            return self._calm_conclusion(counts["note"])
        worst = self.groups[0]
        meaning = CODES.get(worst.first.code, worst.first.message.rstrip("."))
        start = "Not fine" if counts["error"] else "No errors, but a warning"
        totals = [counted(counts[name], name) for name in reversed(SEVERITIES) if counts[name]]
        return f"{start}: in {worst.where(len(self.lines))}, {meaning} ({', '.join(totals)} in all)."

    def _calm_conclusion(self, notes: int) -> str:
        past = 0 if self.audit.trained else self.audit.past_critical_spread
        uncertain = sum(line.heads_by_verdict.get("uncertain", 0) for line in self.lines)
        if self.audit.unjudged or uncertain == sum(line.heads for line in self.lines):
            start = "Cannot tell"
        elif past:
            start = f"No warnings, but {counted(past, 'head')} past the critical spread from the start"
        else:
            start = "Fine"
        extra = "".join(
            f"; {counted(number, word)}" for number, word in ((notes, "note"), (uncertain, "uncertain head")) if number
        )
        spreads = [line.spread for line in self.lines if math.isfinite(line.spread)]
        ends = dict.fromkeys(readable(end, 2) for end in (min(spreads), max(spreads))) if spreads else ["nothing"]
        state = "of a trained model" if self.audit.trained else "at initialisation"
        layers = counted(len(self.lines), "attention layer")
        return f"{start}: {layers} {state}; scores spread by {' to '.join(ends)}{extra}."

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON takes it: None for a number that is not finite."""
        audit = self.audit.to_dict()
        rows = None if self.asked is None or self.what_if is None else self.what_if.to_dict()["rows"]
        found: dict[str, Any] = plain(
            {
                "model": self.title,
                "input": self.fed,
                "device": self.device,
                "rows": self.rows,
                "notes": list(self.notes),
                "conclusion": self.conclusion,
                **audit,
                "layers": {line.name: audit["layers"][line.name] | line.to_dict() for line in self.lines},
                "what_if": None if rows is None else {"layer": self.asked, "rows": rows},
            }
        )
        return found


def check_model(request: Request, rows: int | None = None, what_if: str | None = None) -> Checked:
    """Check the requested model on `rows` rows per head, all if None; `what_if` names a layer to try rules on."""
    return check_loaded(request, rows, what_if)[0]


def check_loaded(request: Request, rows: int | None = None, what_if: str | None = None) -> tuple[Checked, Loaded]:
    """Check the requested model, and return it with its inputs too, to run it again."""
    if request.download:
        download(request)
    with offline(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="Saw no attention")  # the result itself says so
        loaded = load_model(request)
        request.report("running the model")
        unknown, reason, notes = loaded.unknown_share, "", list(loaded.notes)
        if unknown > NOTED_UNKNOWN:
            notes.insert(
                0, f"{unknown:.0%} of the tokens are unknown to the model: give a text that suits it (--text)."
            )
        if unknown > MAX_UNKNOWN:
            reason = f"{unknown:.0%} of the tokens are unknown to the model, so its scores are not judged; give --text."
        with quiet(), as_model_error(f"run {loaded.title} on {loaded.input_description}"):
            audit = audited(loaded.model, loaded.args, loaded.kwargs, rows=rows, unlike=reason)
        request.report("diagnosing")
        # Warnings of a model's own code are not about its attention; where none was seen, the audit itself says so.
        own = [each.message for each in caught if issubclass(each.category, NotFollowedWarning) and audit.layers]
        notes += [f"{' '.join(str(message).split()).rstrip('.')}." for message in own]
        checked = Checked(loaded.title, loaded.input_description, request.device, rows, tuple(notes), audit, what_if)
        if what_if is not None:
            _ = checked.what_if  # an unknown layer is an error here and not when results are shown
        return checked, loaded
