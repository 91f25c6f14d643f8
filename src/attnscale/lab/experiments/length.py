"""How entropy grows with the context, under scales that know its length and one that does not."""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from attnscale.lab.bands import Band, band
from attnscale.lab.cell import Outcome, Settings
from attnscale.lab.experiment import Conclusion, Experiment
from attnscale.lab.outcomes import Outcomes
from attnscale.lab.result import Curve, Plot, Table, column
from attnscale.lab.wording import tally
from attnscale.measure import score_stats
from attnscale.plain import readable
from attnscale.rules import get_rule
from attnscale.rules.log_length import SSMAX_S
from attnscale.rules.rule import Rule
from attnscale.theory import expected_row, freezing_point

HEADS, ROWS, HEAD_DIM = 4, 64, 64
TRAINED = 64  # the context that YaRN stretches from
RULES = ("1/√d_k", "log n", "YaRN")
FEW, KNOTS = 8, 16  # rows with few keys are taken one by one, of the others some
STEADY = 0.1  # of the growth of ln n: an entropy that grows less than this is held


def grid(quick: bool) -> Sequence[Settings]:
    """Every rule over every length; rows that see all keys, and causal ones."""
    full = [16, 64, 256, 1024] if quick else [16, 64, 256, 1024, 4096, 16384]
    causal = [64, 256] if quick else [64, 256, 1024, 2048]
    return [
        {"rule": rule, "causal": is_causal, "length": length}
        for is_causal, lengths in ((False, full), (True, causal)) for rule in RULES for length in lengths
    ]  # fmt: skip


def rule_for(rule: str, length: int) -> Rule:
    """The rule of the library, made for a context of this length."""
    stretched = max(length / TRAINED, 1.0)
    return get_rule({"1/√d_k": "inverse_sqrt", "log n": "log_length", "YaRN": f"yarn:{stretched}"}[rule])


def run(rule: str, causal: bool, length: int, seed: int) -> Outcome:
    """Entropy of rows over random keys, and how many keys count."""
    query, key = torch.randn(HEADS, length if causal else ROWS, HEAD_DIM), torch.randn(HEADS, length, HEAD_DIM)
    stats = score_stats(query, key, scale=rule_for(rule, length), is_causal=causal)
    return {name: getattr(stats, name).mean().item() for name in ("entropy", "entropy_ratio", "effective_keys", "top1")}


def expected_entropy(rule: str, causal: bool, length: int) -> float:
    """Of a row over Gaussian keys; of a causal one, the mean over rows that see 1, 2, … keys."""
    if not causal:
        return _entropy(rule, length, length)
    few = range(2, min(FEW, length) + 1)
    total = sum(_entropy(rule, keys, length) for keys in few)  # a row that sees one key has none
    if length > FEW:
        total += _many(rule, length)
    return total / length


def _many(rule: str, length: int) -> float:
    """The sum over rows that see more keys than a few: smooth in ln n, so that some of them tell all."""
    middle, half = (math.log(length) + math.log(FEW)) / 2, (math.log(length) - math.log(FEW)) / 2
    at = np.exp(middle + half * np.cos(np.linspace(0, math.pi, KNOTS)))
    knots = np.unique(at.round().astype(int))
    entropies = [_entropy(rule, int(keys), length) for keys in knots]
    degree = min(len(knots) - 1, KNOTS - 4)
    fitted = np.polynomial.Polynomial.fit(np.log(knots), entropies, degree)
    return float(fitted(np.log(np.arange(FEW + 1, length + 1))).sum())


def _entropy(rule: str, keys: int, length: int) -> float:
    some = torch.zeros(1, HEAD_DIM)
    scale = rule_for(rule, length)(some, some, keys)[2]
    return _cached_entropy(scale * math.sqrt(HEAD_DIM), keys)


@lru_cache(maxsize=4096)
def _cached_entropy(spread: float, keys: int) -> float:
    return expected_row(spread, keys, HEAD_DIM).entropy


def conclude(outcomes: Outcomes) -> Conclusion:
    """How much of the growth of ln n each rule lets into the entropy."""
    full, causal = (outcomes.where(causal=is_causal) for is_causal in (False, True))
    curves = 2 * len(RULES)
    checks = [
        own.check(f"{rule}: entropy of {rows} over Gaussian keys is its exact expectation", "entropy",
                  {length: expected_entropy(rule, is_causal, length) for length in own.values("length")},
                  "length", curves, rule=rule)
        for is_causal, own, rows in ((False, full, "full rows"), (True, causal, "causal rows")) for rule in RULES
    ]  # fmt: skip
    lengths = full.values("length")
    shares = {rule: growth(full.where(rule=rule), TRAINED) for rule in RULES}
    text = (
        f"From {TRAINED} to {lengths[-1]} keys ln n grows by {math.log(lengths[-1] / TRAINED):.2f}; "
        + "of that, entropy takes "
        + ", ".join(f"{share:.0%} under {rule}" for rule, share in shares.items())
        + ". " + " ".join(_verdict(full, rule, shares[rule]) for rule in RULES) + " " + _frozen(full) + tally(checks)
    )  # fmt: skip
    return Conclusion(text, tuple(checks), (_table(outcomes),), _plots(full, causal))


def growth(outcomes: Outcomes, start: int) -> Band:
    """How much of the growth of ln n from `start` on the entropy has, seed by seed."""
    end = outcomes.values("length")[-1]
    pairs = zip(outcomes.samples("entropy", length=end), outcomes.samples("entropy", length=start), strict=True)
    return band((last - first) / math.log(end / start) for last, first in pairs)


def _verdict(full: Outcomes, rule: str, share: Band) -> str:
    ends = TRAINED, full.values("length")[-1]
    first, last = (full.band("effective_keys", rule=rule, length=length).mean for length in ends)
    if share.high < -STEADY:
        what = "sharpens with length"
    elif share.low > STEADY:
        what = "dilutes with length" if share.low > 1 - STEADY else "dilutes more slowly"
    else:
        what = "holds its entropy"
    return f"Under {rule} attention {what}: {readable(first)} keys count at {TRAINED}, {readable(last)} at the end."


def _frozen(full: Outcomes) -> str:
    """Where s ln n passes √(2 ln n)."""
    limit = math.exp(2 / SSMAX_S**2)
    longest = full.values("length")[-1]
    beyond = "beyond what was run" if longest < limit else "within what was run"
    point = freezing_point(longest)
    return (
        f"A spread of {SSMAX_S:g} ln n passes the freezing point √(2 ln n) at {limit:,.0f} random keys, {beyond}; at "
        f"{longest} it is {SSMAX_S * math.log(longest) / point:.2f} of it. "
    )


def _table(outcomes: Outcomes) -> Table:
    rows = tuple(
        (rule, "causal" if is_causal else "full", length, expected_entropy(rule, is_causal, length),
         (found := own.band("entropy", rule=rule, length=length)).mean, found.half,
         *(own.band(name, rule=rule, length=length).mean for name in ("entropy_ratio", "effective_keys", "top1")))
        for is_causal in (False, True) for own in (outcomes.where(causal=is_causal),)
        for rule in RULES for length in own.values("length")
    )  # fmt: skip
    columns = ("rule", "rows", "keys", "expected H", "measured", "±", "H / ln n", "keys that count", "top-1")
    return Table("Entropy against context length", columns, rows)


def _plots(full: Outcomes, causal: Outcomes) -> tuple[Plot, ...]:
    def both(own: Outcomes, is_causal: bool) -> tuple[Curve, ...]:
        lengths = own.values("length")
        curves = []
        for rule in RULES:
            theory = column([expected_entropy(rule, is_causal, length) for length in lengths])
            curves += [
                own.curve(rule, "length", "entropy", rule=rule),
                Curve(f"{rule}, expected", tuple(map(float, lengths)), theory, is_theory=True),
            ]
        return tuple(curves)

    lengths = full.values("length")
    uniform = Curve("ln n", tuple(map(float, lengths)), column([math.log(n) for n in lengths]), is_theory=True)

    def measured(measure: str) -> tuple[Curve, ...]:
        return tuple(full.curve(rule, "length", measure, rule=rule) for rule in RULES)

    return (
        Plot("Entropy against context length", "keys", "H, nats", (*both(full, False), uniform),
             "A line beside ln n dilutes as fast as the context grows; a level one holds.", log_x=True),
        Plot("Share of the largest entropy", "keys", "H / ln n", measured("entropy_ratio"),
             "At 1 all keys count alike, however many there are.", log_x=True),
        Plot("Keys that count", "keys", "1 / Σp²", measured("effective_keys"),
             "How many keys a row mixes; a model trained at one length meets another.", log_x=True, log_y=True),
        Plot("Causal rows", "keys", "mean H, nats", both(causal, True),
             "Each row sees its own prefix; log n counts that, YaRN the whole context.", log_x=True),
    )  # fmt: skip


EXPERIMENT = Experiment("length", "How does entropy grow with the context under 1/√d_k, log n and YaRN?",
                        grid, run, conclude, seeds=16, quick_seeds=8, core_minutes=0.13)  # fmt: skip
