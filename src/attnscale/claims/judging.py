"""Judge claims: a number by its printed digits, a statement by evidence."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike

from attnscale.reference import Array

ARITHMETIC, STATEMENT = "arithmetic", "statement"
CONFIRMED, QUALIFIED, REFUTED = VERDICTS = ("confirmed", "qualified", "refuted")
FLOAT_SLACK = 1 + 1e-9  # decimal fractions are inexact: 0.2 − 0.15 is slightly more than 0.05
FACTOR = 2.0  # larger errors are reported as a factor, smaller ones as a difference
EXACT_INTEGERS = 2**53  # float64 represents all integers up to here
EXTRA_DIGITS = 2  # digits of a recomputed number beyond those of the claimed one

Value = str | int | float | list[int | float]


@dataclass(frozen=True)
class Evidence:
    """Result of a computation: support for a statement, True or False, and the numbers."""

    holds: bool
    shown: str


@dataclass(frozen=True)
class Limit:
    """Condition under which a statement holds, and a case without it.

    `is_stated`: the source states the condition itself, so the statement counts as confirmed.
    """

    condition: str
    counterexample: str
    evidence: Callable[[], Evidence]
    is_stated: bool = False


@dataclass(frozen=True)
class Entry:
    """A claim with its computation, which returns numbers for a claimed number and Evidence for a statement.

    A claimed number is text, because its printed digits define its precision; spaces separate the entries of a vector.
    """

    id: str
    claim: str
    claimed: str
    compute: Callable[[], ArrayLike | Evidence]
    remark: str = ""
    limit: Limit | None = None
    section: str = ""


@dataclass(frozen=True)
class Source:
    """Article with claims to judge."""

    name: str
    title: str
    kind: str
    entries: list[Entry] = field(default_factory=list)

    def add(self, section: str, *entries: Entry) -> None:
        """Add the claims of a section of the article."""
        self.entries.extend(replace(entry, section=section) for entry in entries)


@dataclass(frozen=True)
class Claim:
    """Judged claim, one line of the ledger."""

    id: str
    source: str
    section: str
    kind: str  # ARITHMETIC for a number that needs no data, random draw or model; else STATEMENT
    claim: str
    claimed: Value
    computed: Value
    verdict: str
    note: str


def judge(entry: Entry, source: str) -> Claim:
    """Compute an entry and return its verdict.

    >>> from math import exp
    >>> judge(Entry("exp-10", "The value of e¹⁰.", "22,027", lambda: exp(10)), "notes").note
    'Claimed is 0.534 too high.'
    """
    found = entry.compute()
    kind = STATEMENT if isinstance(found, Evidence) else ARITHMETIC
    if isinstance(found, Evidence):
        claimed, computed, verdict, note = _judge_statement(entry, found)
    else:
        claimed, computed, verdict, note = _judge_number(entry, np.atleast_1d(np.asarray(found, dtype=np.float64)))
    note = " ".join(filter(None, (note, entry.remark)))
    return Claim(entry.id, source, entry.section, kind, entry.claim, claimed, computed, verdict, note)


def _judge_number(entry: Entry, computed: Array) -> tuple[Value, Value, str, str]:
    texts = [text.replace(",", "") for text in entry.claimed.split()]
    decimals = [len(text.partition(".")[2]) for text in texts]
    claimed = np.array([float(text) for text in texts])
    half_units = np.array([0.5 * 10.0**-places for places in decimals])
    is_right = bool((abs(claimed - computed) <= half_units * FLOAT_SLACK).all())
    return (
        _unwrap([float(text) if "." in text else int(text) for text in texts]),
        _unwrap([_short(x, places) for x, places in zip(computed.tolist(), decimals, strict=True)]),
        CONFIRMED if is_right else REFUTED,
        "" if is_right else _difference(claimed, computed, float(half_units.sum())),
    )


def _judge_statement(entry: Entry, found: Evidence) -> tuple[Value, Value, str, str]:
    limit = entry.limit
    if limit is None:
        return entry.claimed, found.shown, CONFIRMED if found.holds else REFUTED, ""
    beyond = limit.evidence()
    computed = f"{found.shown}; {beyond.shown}"
    if not found.holds:
        return entry.claimed, computed, REFUTED, f"False even {limit.condition}."
    if beyond.holds:
        return entry.claimed, computed, CONFIRMED, f"True {limit.condition}, and also {limit.counterexample}."
    if limit.is_stated:
        note = f"True {limit.condition}, as the source says. False {limit.counterexample}."
        return entry.claimed, computed, CONFIRMED, note
    return entry.claimed, computed, QUALIFIED, f"True {limit.condition}. False {limit.counterexample}."


def _difference(claimed: Array, computed: Array, rounding: float) -> str:
    """Describe the error of a claimed number, and report claimed weights that do not sum to one."""
    if claimed.size > 1:
        are_weights = np.isclose(computed.sum(), 1.0) and (computed >= 0).all()
        is_off = are_weights and abs(claimed.sum() - 1.0) > rounding
        total = f"; the claimed weights sum to {claimed.sum():.4g}" if is_off else ""
        return f"Largest difference {abs(claimed - computed).max():.2g}{total}."
    was, is_ = claimed.item(), computed.item()
    if was * is_ > 0 and not 1 / FACTOR < is_ / was < FACTOR:
        larger, smaller = sorted((abs(was), abs(is_)), reverse=True)
        return f"Claimed is {larger / smaller:.4g} times too {'small' if abs(was) < abs(is_) else 'large'}."
    return f"Claimed is {abs(was - is_):.3g} too {'low' if was < is_ else 'high'}."


def _short(value: float, decimals: int) -> int | float:
    rounded = round(value, decimals + EXTRA_DIGITS) + 0.0  # + 0.0 turns −0.0 into 0.0
    return int(rounded) if not decimals and rounded.is_integer() and abs(rounded) < EXACT_INTEGERS else rounded


def _unwrap(values: list[int | float]) -> int | float | list[int | float]:
    return values[0] if len(values) == 1 else values
