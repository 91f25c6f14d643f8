"""Compute the effect of another scale, soft-cap or clip on the scores of queries and keys."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnscale.attending.call import Call
from attnscale.attending.running import run
from attnscale.errors import SettingError
from attnscale.inputs import check_inputs
from attnscale.measure.measuring import measured
from attnscale.measure.statistics import STATISTICS
from attnscale.measure.stats import ScoreStats, merged_when_read
from attnscale.numerics import wide_dtype, without_autocast
from attnscale.operator import scaled_call
from attnscale.plain import plain, readable
from attnscale.results import Result
from attnscale.rules import RULES, get_rule
from attnscale.rules.apply import Scale, apply_scale
from attnscale.rules.rule import Scaled, Visible, multiply
from attnscale.visibility import Visibility
from attnscale.watching.layer import SavedCall

SOFTCAPS = (30.0, 50.0)  # used by Grok and Gemma 2
TINY = 1e-300  # avoids a division by a norm of zero
CLIP = 100.0  # threshold of QK-Clip in Kimi K2
CURRENT = "current"
TRIED = ("spread", "entropy", "entropy_ratio", "top1", "jacobian_trace", "max")
WIDTHS = {"entropy_ratio": 9, "top1": 7, "jacobian_trace": 7}
# Heading and width of each column; the line has 80 characters with the name.
COLUMNS = {"scale": 8} | {STATISTICS[name].short: WIDTHS.get(name, 8) for name in TRIED} | {"output\nchange": 7}
NAME_WIDTH = 18  # LearnedTemperature just fits


@dataclass(frozen=True)
class Candidate:
    """A scale, as accepted by attention(), and a soft-cap."""

    scale: Scale = None
    softcap: float | None = None


@dataclass(frozen=True)
class Outcome:
    """One line of the table; the catalogue of statistics defines how heads are combined."""

    name: str
    scale: float  # mean multiplier of q·k; for a rule that normalises, it includes the norms
    spread: float
    entropy: float
    entropy_ratio: float
    top1: float
    jacobian_trace: float
    max: float
    output_change: float  # ‖output − current output‖ / ‖current output‖; NaN without values

    def numbers(self) -> tuple[str, ...]:
        """Return the cells of its line, in the order of COLUMNS."""
        cells = [readable(self.scale), readable(self.spread), f"{self.entropy:.2f}", f"{100 * self.entropy_ratio:.1f}"]
        cells += [f"{self.top1:.3f}", f"{self.jacobian_trace:.3f}", readable(self.max)]
        return (*cells, "–" if math.isnan(self.output_change) else f"{self.output_change:.3f}")


@dataclass(frozen=True, repr=False)
class WhatIf(Result):
    """Statistics of the current setting and of all candidates."""

    rows: tuple[Outcome, ...]

    def __getitem__(self, name: str) -> Outcome:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"No candidate {name!r}. Expected one of: {', '.join(row.name for row in self.rows)}.")

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain values for JSON."""
        return {"rows": [plain(asdict(row)) for row in self.rows]}

    def __str__(self) -> str:
        above, below = zip(*(heading.rpartition("\n")[::2] for heading in COLUMNS), strict=True)
        return "\n".join([_line("", above), _line("", below), *(_line(row.name, row.numbers()) for row in self.rows)])


@torch.no_grad()
def what_if(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    candidates: Mapping[str, Candidate | Scale] | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    scale: Scale = None,
    softcap: float | None = None,
    rows: int | None = None,
) -> WhatIf:
    """Measure the scores and the output under each candidate; `scale` and `softcap` are the current ones.

    The default candidates are every rule, soft-caps of 30 and 50, and QK-Clip at 100. The change of the output is
    computed with `value`. Without a value, the key is used instead, which only shows how much the weights change.

    >>> table = what_if(4 * torch.randn(1, 2, 32, 64), torch.randn(1, 2, 32, 64))
    >>> table["calibrated"].jacobian_trace > table["current"].jacobian_trace
    True
    """
    query, key = _with_batch(query), _with_batch(key)
    value = key if value is None else _with_batch(value)
    if enable_gqa:
        key, value = _for_each_query_head(key, query), _for_each_query_head(value, query)
    check_inputs(query, key, value, attn_mask, is_causal, False, softcap)
    visibility = Visibility.of(attn_mask, is_causal)
    return _tried([_Trial(query, key, value, visibility, Candidate(scale, softcap), rows)], candidates)


@torch.no_grad()
def what_if_calls(
    calls: Sequence[SavedCall],
    candidates: Mapping[str, Candidate | Scale] | None = None,
    rows: int | None = None,
    measured: ScoreStats | None = None,
) -> WhatIf:
    """Measure each candidate over saved calls; `measured` are the statistics of the calls themselves.

    Every candidate uses the biases and masks of the calls.
    """
    return _tried([_trial(call, rows) for call in calls], candidates, measured)


def _trial(call: SavedCall, rows: int | None) -> "_Trial":
    query, key = call.query, _for_each_query_head(call.key, call.query)
    value = None if call.value is None else _for_each_query_head(call.value, query)
    scale = call.scales.nan_to_num(query.shape[-1] ** -0.5).to(query.device).view(-1, 1, 1)
    return _Trial(query, key, value, call.visibility, Candidate(scale, call.softcap), rows)


def _with_batch(tensor: Tensor) -> Tensor:
    return tensor[(None,) * (4 - tensor.dim())]  # (batch, heads, length, features)


def _for_each_query_head(tensor: Tensor, query: Tensor) -> Tensor:
    found, heads = tensor.shape[-3], query.shape[-3]
    if found == 0 or heads % found:
        raise SettingError(f"Expected key heads that divide the query's {heads}, got {found}.")
    return tensor.repeat_interleave(heads // found, dim=-3)


def _tried(
    trials: "Sequence[_Trial]", candidates: Mapping[str, Candidate | Scale] | None, measured: ScoreStats | None = None
) -> WhatIf:
    """Measure every candidate on all trials; `measured` are the statistics of the current setting, or None."""
    now = [trial.current for trial in trials]
    outputs = [trial.output(trial.current) for trial in trials]
    before = _stats(trials, now) if measured is None else measured
    choices = [trial.candidates(candidates, before.max) for trial in trials]
    rows = [_outcome(CURRENT, trials, now, outputs, before)]
    for name in choices[0]:
        chosen = [each[name] for each in choices]
        rows.append(_outcome(name, trials, chosen, outputs, _stats(trials, chosen)))
    return WhatIf(tuple(rows))


def _stats(trials: "Sequence[_Trial]", chosen: Sequence[Candidate]) -> ScoreStats:
    return merged_when_read([trial.stats(candidate) for trial, candidate in zip(trials, chosen, strict=True)])


def _outcome(
    name: str,
    trials: "Sequence[_Trial]",
    chosen: Sequence[Candidate],
    before: Sequence[Tensor | None],
    stats: ScoreStats,
) -> Outcome:
    pairs = list(zip(trials, chosen, strict=True))
    return Outcome(
        name=name,
        scale=sum(trial.multiplier(candidate) for trial, candidate in pairs) / len(pairs),
        output_change=_change(before, [trial.output(candidate) for trial, candidate in pairs]),
        **{statistic: STATISTICS[statistic].whole(stats) for statistic in TRIED},
    )


def _change(before: Sequence[Tensor | None], after: Sequence[Tensor | None]) -> float:
    """Return the relative change of the outputs; NaN if a value is missing."""
    moved, was = 0.0, 0.0
    for old, new in zip(before, after, strict=True):
        if old is None or new is None:
            return math.nan
        moved, was = moved + _norm(new.double() - old.double()) ** 2, was + _norm(old) ** 2
    return math.sqrt(moved) / max(math.sqrt(was), TINY)


@dataclass(frozen=True)
class _Trial:
    """Tensors of one call, (batch, heads, length, features), on which candidates are tried."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    visibility: Visibility
    current: Candidate
    rows: int | None

    def candidates(self, requested: Mapping[str, Candidate | Scale] | None, largest: Tensor) -> Mapping[str, Candidate]:
        """Return the caller's candidates; by default every rule (learned rules untrained), two soft-caps and a clip.

        Rules with a required parameter get one: `constant` 1/d_k, `temperature` √d_k / 2, `yarn` a factor of 4.
        The soft-caps and the clip keep the current scale, the rules the current soft-cap. QK-Clip scales each head
        down to the threshold, by γ = min(1, 100/largest).
        """
        if requested is not None:
            return {name: self._candidate(each) for name, each in requested.items()}
        head_dim, current = self.query.shape[-1], self.current
        numbers = {"constant": 1 / head_dim, "temperature": math.sqrt(head_dim) / 2, "yarn": 4.0}
        names = [f"{name}:{numbers[name]:.4g}" if name in numbers else name for name in RULES]
        gamma = torch.where(largest > CLIP, CLIP / largest, 1.0).view(-1, 1, 1).to(self.query.device)

        def clip(query: Tensor, key: Tensor, visible: Visible = None) -> Scaled:
            scaled_query, scaled_key, factor = self._scaled(current)
            return multiply(scaled_query, gamma), scaled_key, factor

        found = {name: self._candidate(name) for name in names}
        found |= {f"softcap:{cap:g}": Candidate(current.scale, cap) for cap in SOFTCAPS}
        return found | {f"clip:{CLIP:g}": Candidate(clip, current.softcap)}

    def _candidate(self, candidate: Candidate | Scale) -> Candidate:
        if isinstance(candidate, Candidate):
            return candidate
        if isinstance(candidate, str | type):
            candidate = get_rule(candidate, head_dim=self.query.shape[-1], heads=self.query.shape[-3])
        return Candidate(candidate, self.current.softcap)

    def stats(self, candidate: Candidate) -> ScoreStats:
        with without_autocast(self.query):
            return measured(self._call(candidate, self.key), self.rows)

    def output(self, candidate: Candidate) -> Tensor | None:
        return None if self.value is None else run(self._call(candidate, self.value))

    def multiplier(self, candidate: Candidate) -> float:
        query, key, factor = self._scaled(candidate)
        norms = _norm(query) * _norm(key) / max(_norm(self.query) * _norm(self.key), TINY)
        return factor * norms

    def _call(self, candidate: Candidate, value: Tensor) -> Call:
        scale = self._on_device(candidate.scale)
        return scaled_call(self.query, self.key, value, self.visibility, scale, False, candidate.softcap)

    def _scaled(self, candidate: Candidate) -> Scaled:
        return apply_scale(self._on_device(candidate.scale), self.query, self.key, self._visible)

    def _visible(self) -> Tensor | None:
        return self.visibility.counts(self.query.shape[-2], self.key.shape[-2], self.query.device)

    def _on_device(self, scale: Scale) -> Scale:
        return scale.to(self.query.device) if isinstance(scale, nn.Module | Tensor) else scale


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=wide_dtype(tensor)))


def _line(name: str, cells: Iterable[str]) -> str:
    shown = name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 1]}…"
    return f"{shown:{NAME_WIDTH}}" + "".join(
        f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True)
    )
