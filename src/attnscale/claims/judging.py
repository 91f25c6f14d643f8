"""How a claim is judged: a number against its recomputation, a statement against its evidence."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from attnscale.reference import Array

CONFIRMED, QUALIFIED, REFUTED = VERDICTS = ("confirmed", "qualified", "refuted")
FLOAT_SLACK = 1 + 1e-9  # half a unit is often no binary fraction: 0.2 − 0.15 is a hair over 0.05
FACTOR = 2.0  # from here on a wrong number is told as a factor, below it as a difference
EXACT_INTEGERS = 2**53  # float64 counts by ones up to here
SHOWN_BEYOND = 2  # digits a recomputed number shows beyond those of the claimed one

Value = str | int | float | list[int | float]


@dataclass(frozen=True)
class Source:
    """One of the texts whose claims are judged, by the name that the ledger has for it."""

    name: str
    title: str
    kind: str


@dataclass(frozen=True)
class Evidence:
    """What a computation found: whether it bears the statement out, and the numbers that say so."""

    holds: bool
    shown: str


@dataclass(frozen=True)
class Limit:
    """Where a statement ends: the condition it needs, and a case without it.

    A condition that the source itself sets is its own: the statement holds as it was made, and where it ends is told.
    """

    condition: str
    counterexample: str
    evidence: Callable[[], Evidence]
    is_stated: bool = False


@dataclass(frozen=True)
class Number:
    """A claimed number as printed, so that its digits say how exact it means to be; spaces part a vector's entries."""

    id: str
    claim: str
    claimed: str
    compute: Callable[[], ArrayLike]
    remark: str = ""


@dataclass(frozen=True)
class Statement:
    """A claim in words, with the evidence for it under its condition and, where there is one, its limit."""

    id: str
    claim: str
    claimed: str
    evidence: Callable[[], Evidence]
    limit: Limit | None = None
    remark: str = ""


@dataclass(frozen=True)
class Claim:
    """One judged line of the ledger."""

    id: str
    source: str
    claim: str
    claimed: Value
    computed: Value
    verdict: str
    note: str


def judge(entry: Number | Statement, source: Source) -> Claim:
    """Compute the verdict of one entry.

    >>> from math import exp
    >>> source = Source("notes", "Notes on softmax", "blog post")
    >>> judge(Number("exp-10", "The value of e¹⁰.", "22,027", lambda: exp(10)), source).note
    'Claimed is 0.534 too high.'
    """
    return _judge_number(entry, source) if isinstance(entry, Number) else _judge_statement(entry, source)


def _judge_number(entry: Number, source: Source) -> Claim:
    texts = [text.replace(",", "") for text in entry.claimed.split()]
    decimals = [len(text.partition(".")[2]) for text in texts]
    claimed = np.array([float(text) for text in texts])
    computed = np.atleast_1d(np.asarray(entry.compute(), dtype=np.float64))
    half_units = np.array([0.5 * 10.0**-places for places in decimals])
    right = bool((abs(claimed - computed) <= half_units * FLOAT_SLACK).all())
    notes = ["" if right else _difference(claimed, computed, float(half_units.sum())), entry.remark]
    return Claim(
        id=entry.id,
        source=source.name,
        claim=entry.claim,
        claimed=_unwrap([float(text) if "." in text else int(text) for text in texts]),
        computed=_unwrap([_short(x, places) for x, places in zip(computed.tolist(), decimals, strict=True)]),
        verdict=CONFIRMED if right else REFUTED,
        note=" ".join(filter(None, notes)),
    )


def _judge_statement(entry: Statement, source: Source) -> Claim:
    found = entry.evidence()
    beyond = entry.limit.evidence() if entry.limit else None
    note, is_stated = "", entry.limit is not None and entry.limit.is_stated
    if entry.limit and beyond:
        if not found.holds:
            note = f"Not even {entry.limit.condition}."
        elif beyond.holds:
            note = f"True {entry.limit.condition}, and {entry.limit.counterexample} too."
        else:
            told = "True as the source has it," if is_stated else "True"
            note = f"{told} {entry.limit.condition}; not {entry.limit.counterexample}."
    return Claim(
        id=entry.id,
        source=source.name,
        claim=entry.claim,
        claimed=entry.claimed,
        computed="; ".join(evidence.shown for evidence in (found, beyond) if evidence),
        verdict=verdict(found.holds, None if beyond is None or is_stated else beyond.holds),
        note=" ".join(filter(None, (note, entry.remark))),
    )


def verdict(under_condition: bool, without_it: bool | None) -> str:
    """`refuted` if it fails under its condition, `qualified` if it fails only without one it does not set itself."""
    if not under_condition:
        return REFUTED
    return CONFIRMED if without_it is None or without_it else QUALIFIED


def _difference(claimed: Array, computed: Array, rounding: float) -> str:
    """By how much a claimed number misses, and whether claimed weights fail to sum to one."""
    if claimed.size > 1:
        weights = np.isclose(computed.sum(), 1.0) and (computed >= 0).all()
        astray = weights and abs(claimed.sum() - 1.0) > rounding
        total = f"; the claimed weights sum to {claimed.sum():.4g}" if astray else ""
        return f"Largest difference {abs(claimed - computed).max():.2g}{total}."
    was, is_ = claimed.item(), computed.item()
    if was * is_ > 0 and not 1 / FACTOR < is_ / was < FACTOR:
        larger, smaller = sorted((abs(was), abs(is_)), reverse=True)
        return f"Claimed is {larger / smaller:.4g} times too {'small' if abs(was) < abs(is_) else 'large'}."
    return f"Claimed is {abs(was - is_):.3g} too {'low' if was < is_ else 'high'}."


def _short(value: float, decimals: int) -> int | float:
    rounded = round(value, decimals + SHOWN_BEYOND) + 0.0  # + 0.0 turns −0.0 into 0.0
    return int(rounded) if not decimals and rounded.is_integer() and abs(rounded) < EXACT_INTEGERS else rounded


def _unwrap(values: list[int | float]) -> int | float | list[int | float]:
    return values[0] if len(values) == 1 else values
