"""What another scale, soft-cap or clip would do to the scores of a query and a key."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from attnscale.errors import SettingError
from attnscale.measure.engine import score_stats
from attnscale.measure.statistics import STATISTICS
from attnscale.measure.stats import ScoreStats
from attnscale.numerics import wide_dtype
from attnscale.operator import attention
from attnscale.plain import plain
from attnscale.rules import RULES, get_rule
from attnscale.rules.apply import Scale, apply_scale
from attnscale.rules.rule import Scaled, Visible, multiply
from attnscale.visibility import Visibility

SOFTCAPS = (30.0, 50.0)  # Grok's and Gemma 2's
TINY = 1e-300  # what a zero norm is divided by
CLIP = 100.0  # Kimi K2's QK-Clip
CURRENT = "current"
AskVisible: TypeAlias = Callable[[], Tensor | None]
TRIED = ("spread", "entropy", "entropy_ratio", "top1", "gradient_gain", "max")
# Heading and width, 80 with the name; the last line of a short heading will do, as the entropy stands beside its share.
COLUMNS = (
    {"scale": 8}
    | {STATISTICS[name].short.split("\n")[-1]: 7 if name in ("top1", "gradient_gain") else 8 for name in TRIED}
    | {"change": 8}
)
NAME_WIDTH = 18  # of 80 columns; LearnedTemperature just fits


@dataclass(frozen=True)
class Candidate:
    """What to try: a scale, as attention() takes it, and a soft-cap."""

    scale: Scale = None
    softcap: float | None = None


@dataclass(frozen=True)
class Outcome:
    """One line of the table; heads become one number as the catalogue of statistics says."""

    name: str
    scale: float  # what q·k is multiplied by, on average: a rule that normalises counts by the norms it leaves
    spread: float
    entropy: float
    entropy_ratio: float
    top1: float
    gradient_gain: float
    max: float
    change: float  # ‖output − current output‖ / ‖current output‖

    def numbers(self) -> tuple[str, ...]:
        """The cells of its line, in the order of COLUMNS."""
        ratios = (f"{number:.3f}" for number in (self.entropy_ratio, self.top1, self.gradient_gain))
        start = f"{self.scale:.3g}", f"{self.spread:.3g}", f"{self.entropy:.2f}"
        return (*start, *ratios, f"{self.max:.3g}", f"{self.change:.3f}")


@dataclass(frozen=True)
class WhatIf:
    """The current setting and every candidate, side by side."""

    rows: tuple[Outcome, ...]

    def __getitem__(self, name: str) -> Outcome:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"No candidate {name!r}. Expected one of: {', '.join(row.name for row in self.rows)}.")

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON takes it."""
        return {"rows": [plain(asdict(row)) for row in self.rows]}

    def __str__(self) -> str:
        return "\n".join([_line("", COLUMNS), *(_line(row.name, row.numbers()) for row in self.rows)])


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

    By default every rule, soft-caps of 30 and 50, and QK-Clip at 100. The change of the output is taken with `value`;
    without one the key stands in for it, which tells how far the weights move, though not in which direction.

    >>> table = what_if(4 * torch.randn(1, 2, 32, 64), torch.randn(1, 2, 32, 64))
    >>> table["calibrated"].gradient_gain > table["current"].gradient_gain
    True
    """
    heads = query.shape[-3] if query.dim() > 2 else 1
    if enable_gqa:
        key, value = _for_each_query_head(key, heads), None if value is None else _for_each_query_head(value, heads)
    trial = _Trial(query, key, key if value is None else value, attn_mask, is_causal, rows)
    current = Candidate(scale, softcap)
    before, output = trial.stats(current), trial.output(current)
    if candidates is None:
        tried = default_candidates(query, current, before, trial.visible)
    else:
        tried = {name: _as_candidate(given, query.shape[-1], heads, softcap) for name, given in candidates.items()}
    outcomes = [trial.outcome(name, candidate, output) for name, candidate in tried.items()]
    return WhatIf((trial.outcome(CURRENT, current, output), *outcomes))


def default_candidates(
    query: Tensor, current: Candidate, before: ScoreStats, visible: AskVisible
) -> dict[str, Candidate]:
    """Every rule, learned ones as they start, two soft-caps and a clip.

    Rules that need a number get a telling one: `constant` 1/d_k, `temperature` half of √d_k, `yarn` a context
    stretched by 4. The soft-caps and the clip keep the current scale, the rules the current soft-cap.
    """
    head_dim, heads = query.shape[-1], query.shape[-3] if query.dim() > 2 else 1
    numbers = {"constant": 1 / head_dim, "temperature": math.sqrt(head_dim) / 2, "yarn": 4.0}
    tried = {}
    for name in RULES:
        written = f"{name}:{numbers[name]:.4g}" if name in numbers else name
        tried[written] = _as_candidate(written, head_dim, heads, current.softcap)
    for cap in SOFTCAPS:
        tried[f"softcap:{cap:g}"] = Candidate(current.scale, cap)
    tried[f"clip:{CLIP:g}"] = Candidate(_Clipped(current.scale, before.max, visible), current.softcap)
    return tried


@dataclass(frozen=True)
class _Trial:
    """One set of tensors, on which candidates are tried."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    rows: int | None

    def visible(self) -> Tensor | None:
        seen = Visibility.of(self.attn_mask, self.is_causal)
        return seen.counts(self.query.shape[-2], self.key.shape[-2], self.query.device)

    def stats(self, candidate: Candidate) -> ScoreStats:
        return score_stats(
            self.query,
            self.key,
            scale=_on(candidate.scale, self.query),
            attn_mask=self.attn_mask,
            is_causal=self.is_causal,
            softcap=candidate.softcap,
            rows=self.rows,
        )

    def output(self, candidate: Candidate) -> Tensor:
        scale = _on(candidate.scale, self.query)
        mask, causal = self.attn_mask, self.is_causal
        return attention(self.query, self.key, self.value, mask, 0.0, causal, scale, softcap=candidate.softcap)

    def outcome(self, name: str, candidate: Candidate, current: Tensor) -> Outcome:
        stats, output = self.stats(candidate), self.output(candidate)
        return Outcome(
            name=name,
            scale=self._multiplier(candidate),
            change=_norm(output.double() - current.double()) / max(_norm(current), TINY),
            **{statistic: STATISTICS[statistic].whole(stats) for statistic in TRIED},
        )

    def _multiplier(self, candidate: Candidate) -> float:
        query, key, factor = apply_scale(_on(candidate.scale, self.query), self.query, self.key, self.visible)
        norms = _norm(query) * _norm(key) / max(_norm(self.query) * _norm(self.key), TINY)
        return factor * norms


@dataclass(frozen=True)
class _Clipped:
    """QK-Clip as a rule: each head above the threshold is brought down to it, γ = min(1, 100/max)."""

    scale: Scale
    largest: Tensor  # score of each head
    ask_visible: AskVisible

    def __call__(self, query: Tensor, key: Tensor, visible: Visible = None) -> Scaled:
        query, key, factor = apply_scale(_on(self.scale, query), query, key, self.ask_visible)
        gamma = torch.where(self.largest > CLIP, CLIP / self.largest, 1.0).to(query.device)
        return multiply(query, gamma.view(-1, 1, 1) if query.dim() > 2 else gamma), key, factor


def _as_candidate(given: Candidate | Scale, head_dim: int, heads: int, softcap: float | None) -> Candidate:
    if isinstance(given, Candidate):
        return given
    if isinstance(given, str | type):
        given = get_rule(given, head_dim=head_dim, heads=heads)
    return Candidate(given, softcap)


def _on(scale: Scale, query: Tensor) -> Scale:
    """A learned rule on the query's device; everything else as it is."""
    if isinstance(scale, nn.Module):
        return scale.to(query.device)
    return scale.to(query.device) if isinstance(scale, Tensor) else scale


def _for_each_query_head(tensor: Tensor, heads: int) -> Tensor:
    found = tensor.shape[-3] if tensor.dim() > 2 else 1
    if found == 0 or heads % found:
        raise SettingError(f"Expected key heads that divide the query's {heads}, got {found}.")
    return tensor.repeat_interleave(heads // found, dim=-3) if tensor.dim() > 2 else tensor


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=wide_dtype(tensor)))


def _line(name: str, cells: Iterable[str]) -> str:
    shown = name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 1]}…"
    return f"{shown:{NAME_WIDTH}}" + "".join(
        f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True)
    )
