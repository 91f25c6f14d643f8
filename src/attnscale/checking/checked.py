"""`attnscale check`: load a model, watch it and diagnose it; text, JSON and HTML render the same result object."""

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

WHAT_IF_ROWS = 256  # rows per head and candidate; enough for a table, and fast at any length
MEANINGS = {
    "sharp": "a few keys take most of the weight",
    "diluted": "the weights of a row are nearly equal, as small initial projections leave them",
    "uncertain": "too few rows were sampled for a verdict; sample more (--rows)",
}
NORMAL_IF_TRAINED = "sharp"
# Shares of unknown tokens. Above the first, a note is added; above the second, a trained model's scores are not judged.
NOTED_UNKNOWN, MAX_UNKNOWN = 0.05, 0.30


@dataclass(frozen=True)
class Line:
    """One layer of the table: means over its heads, NaN without a finite value."""

    name: str
    heads: int
    head_dim: int
    statistics: Mapping[str, float]  # statistics of Place.CHECK
    errors: Mapping[str, float]  # standard errors, if rows were sampled
    spread_expected: float  # spread of independent queries and keys with these norms at the expected scale
    scale_applied: float
    scale_expected: float
    verdict: str  # the code of the worst warning or error in the layer, else the state of its heads
    verdict_text: str  # verdict with the number of its heads; `healthy` if sharp heads are normal
    heads_by_verdict: Mapping[str, int]
    severity: str | None  # severity of the worst finding in the layer
    code: str | None  # code of the worst finding

    @property
    def spread(self) -> float:
        """Spread of the scores."""
        return self.statistics["spread"]

    def to_dict(self) -> dict[str, Any]:
        """Return the line as a flat dict of plain values."""
        flat = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "statistics"}
        flat |= {"errors": dict(self.errors), "heads_by_verdict": dict(self.heads_by_verdict)}
        return flat | dict(self.statistics)


def line_of(layer: Layer, findings: list[Finding], trained: bool = False) -> Line:
    """Return the line of a layer; `findings` are those about the layer, `trained` is True for a trained model."""
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
    """A model with its input, and the audit of its run."""

    title: str
    fed: str  # description of the input
    device: str
    rows: int | None  # sampled rows per head; None: all
    notes: tuple[str, ...]
    audit: Audit
    asked: str | None = None  # layer named by --what-if

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """Lines of the table, one per layer, in execution order."""
        findings = self.audit.findings
        return tuple(
            line_of(layer, [finding for finding in findings if finding.layer == name], self.audit.trained)
            for name, layer in self.audit.layers.items()
        )

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Findings grouped by code and severity, worst first."""
        return grouped(self.audit.findings)

    @property
    def footnotes(self) -> dict[str, str]:
        """Meanings of the verdicts in the table, without `healthy` and codes of findings."""
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
        """Layer for the what-if table: the requested one, else the worst, else the one with the largest spread."""
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
        """Effect of every rule on the layer in focus."""
        return None if self.focus is None else self.audit.what_if(self.focus, rows=WHAT_IF_ROWS)

    @property
    def conclusion(self) -> str:
        """Verdict in one sentence."""
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
        """Return a dict for JSON, with None for NaN and infinite numbers."""
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
    """Check the requested model with `rows` rows per head (None: all); `what_if` names a layer to try rules on."""
    return check_loaded(request, rows, what_if)[0]


def check_loaded(request: Request, rows: int | None = None, what_if: str | None = None) -> tuple[Checked, Loaded]:
    """Check the requested model; return also the loaded model and its inputs, to run it again."""
    if request.download:
        download(request)
    with offline(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="Saw no attention")  # the result shows it
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
        # Only attnscale's own warnings become notes; without any layer, the audit itself reports the problem.
        own = [each.message for each in caught if issubclass(each.category, NotFollowedWarning) and audit.layers]
        notes += [f"{' '.join(str(message).split()).rstrip('.')}." for message in own]
        checked = Checked(loaded.title, loaded.input_description, request.device, rows, tuple(notes), audit, what_if)
        if what_if is not None:
            _ = checked.what_if  # raises the error for an unknown layer now, before results are shown
        return checked, loaded
