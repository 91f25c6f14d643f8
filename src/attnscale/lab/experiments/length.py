"""Entropy and the weight of a leading key as the context grows, under 1/√d_k and rules that depend on the length."""

import math
from collections.abc import Sequence
from functools import lru_cache, partial

import torch

from attnscale.lab.experiment import Check, Conclusion, Curve, Experiment, Outcome, Plot, Settings, product
from attnscale.lab.outcomes import Band, Outcomes, band, column, percent, tally
from attnscale.measure import score_stats
from attnscale.operator import attention_weights
from attnscale.plain import readable
from attnscale.rules import get_rule
from attnscale.rules.log_length import SSMAX_S
from attnscale.rules.rule import Rule
from attnscale.theory import expected_row

HEADS, ROWS, HEAD_DIM = 4, 64, 64
TRAINED = 64  # context length before YaRN stretches it
RULES = ("1/√d_k", "log n", "YaRN")
CONTEXT, LEADING = "random keys", "one leading key"
LEAD, OTHERS = 3.0, -2.0  # SSMax, figure 1: one score and all others
LEADING_RULES = {"softmax": "unscaled", "SSMax": "log_length"}  # on vectors with one component
FAR = [10, 100, 1000, 10_000, 100_000]
STEADY = 0.1  # an entropy that grows by less than this share of ln n counts as constant


def grid(quick: bool) -> Sequence[Settings]:
    """List every rule at every length, for rows that see all keys, causal rows, and rows with one leading key."""
    full = [16, 64, 256, 1024] if quick else [16, 64, 256, 1024, 4096, 16384]
    causal = [64, 256] if quick else [64, 256, 1024, 2048]
    return [
        *product(part=CONTEXT, causal=False, rule=RULES, length=full),
        *product(part=CONTEXT, causal=True, rule=RULES, length=causal),
        *product(part=LEADING, rule=LEADING_RULES, length=FAR),
    ]


def rule_for(rule: str, length: int) -> Rule:
    """Return the library's rule for a context of this length."""
    stretched = max(length / TRAINED, 1.0)
    return get_rule({"1/√d_k": "inverse_sqrt", "log n": "log_length", "YaRN": f"yarn:{stretched}"}[rule])


def run(part: str, rule: str, length: int, seed: int, causal: bool = False) -> Outcome:
    """Measure the entropy of rows over random keys, or the weight of a leading key."""
    if part == LEADING:
        key = torch.full((length, 1), OTHERS, dtype=torch.float64)
        place = int(torch.randint(length, ()))
        key[place] = LEAD
        weights = attention_weights(torch.ones(1, 1, dtype=torch.float64), key, scale=LEADING_RULES[rule])
        return {"weight": weights[0, place].item()}
    query, key = torch.randn(HEADS, length if causal else ROWS, HEAD_DIM), torch.randn(HEADS, length, HEAD_DIM)
    stats = score_stats(query, key, scale=rule_for(rule, length), is_causal=causal)
    return {name: getattr(stats, name).mean().item() for name in ("entropy", "entropy_ratio", "effective_keys", "top1")}


def leading_weight(rule: str, length: int) -> float:
    """Return the weight of a key that leads all others by 5: softmax gives e⁵ to n − 1, SSMax n^(5s) to n − 1."""
    multiplier = SSMAX_S * math.log(length) if rule == "SSMax" else 1.0
    return 1 / (1 + (length - 1) * math.exp(-multiplier * (LEAD - OTHERS)))


@lru_cache(maxsize=4096)
def expected_entropy(rule: str, length: int) -> float:
    """Return the expected entropy of a row that sees all of `length` Gaussian keys."""
    some = torch.zeros(1, HEAD_DIM)
    scale = rule_for(rule, length)(some, some, length)[2]
    return expected_row(scale * math.sqrt(HEAD_DIM), length, HEAD_DIM).entropy


def conclude(outcomes: Outcomes) -> Conclusion:
    """Compare the growth of the entropy with that of ln n under each rule."""
    context, leading = (outcomes.where(part=part) for part in (CONTEXT, LEADING))
    full, causal = (context.where(causal=is_causal) for is_causal in (False, True))
    checks = [
        full.check(f"{rule}: entropy over Gaussian keys matches theory", "entropy", partial(expected_entropy, rule),
                   "length", len(RULES), rule=rule)
        for rule in RULES
    ] + [_leading_check(leading)]  # fmt: skip
    lengths = full.values("length")
    text = (
        f"From {TRAINED} to {lengths[-1]} keys, ln n grows by {math.log(lengths[-1] / TRAINED):.2f}. "
        + " ".join(_sentence(full.where(rule=rule), rule) for rule in RULES)
        + f" {_on_leading(leading)} {tally(checks)}"
    )
    table = context.table(
        "Entropy against context length", {"causal": "causal", "rule": "rule", "length": "keys"},
        {"entropy": "entropy, nats", "entropy_ratio": "share of max", "effective_keys": "effective keys",
         "top1": "top-1"},
    )  # fmt: skip
    weights = leading.table(
        f"Weight of a key with the score {LEAD:g}, all others {OTHERS:g}", {"rule": "rule", "length": "keys"},
        {"weight": "weight"},
    )  # fmt: skip
    return Conclusion(text, checks, [table, weights], _plots(full, causal, leading))


def _leading_check(leading: Outcomes) -> Check:
    off = 0.0
    for (rule, length), own in leading.groups("rule", "length").items():
        expected = leading_weight(str(rule), int(length or 0))
        off = max(off, *(abs(weight - expected) for weight in own.samples("weight")))
    return Check("the weight of a leading key is 1/(1 + (n − 1) e⁻⁵), under SSMax 1/(1 + (n − 1) n^(−5s))", off < 1e-9,
                 f"{len(leading)} rows, largest difference {off:.1g}")  # fmt: skip


def _on_leading(leading: Outcomes) -> str:
    ends = {
        rule: " to ".join(percent(leading.band("weight", rule=rule, length=n).mean) for n in (FAR[0], FAR[-1]))
        for rule in LEADING_RULES
    }
    return (
        f"A key with the score {LEAD:g} among others of {OTHERS:g} has, over {FAR[0]} to {FAR[-1]:,} keys, "
        + ", ".join(f"{found} of the weight under {rule}" for rule, found in ends.items()) + "."
    )  # fmt: skip


def growth(outcomes: Outcomes) -> Band:
    """Return the growth of the entropy as a share of the growth of ln n, over seeds."""
    end = outcomes.values("length")[-1]
    pairs = zip(outcomes.samples("entropy", length=end), outcomes.samples("entropy", length=TRAINED), strict=True)
    return band((last - first) / math.log(end / TRAINED) for last, first in pairs)


def _sentence(own: Outcomes, rule: str) -> str:
    share, ends = growth(own), (TRAINED, own.values("length")[-1])
    first, last = (readable(own.band("effective_keys", length=length).mean) for length in ends)
    if share.high < -STEADY:
        change = "attention becomes sharper with length"
    elif share.low > STEADY:
        change = f"entropy grows by {share:.0%} of that"
    else:
        change = "entropy stays the same"
    return f"Under {rule} {change}: {first} effective keys of {ends[0]}, {last} of {ends[1]}."


def _plots(full: Outcomes, causal: Outcomes, leading: Outcomes) -> list[Plot]:
    lengths = full.values("length")
    uniform = Curve("ln n", tuple(map(float, lengths)), column([math.log(n) for n in lengths]), is_theory=True)
    return [
        Plot("Entropy against context length", "keys", "entropy, nats",
             (*full.curves("length", "entropy", "rule", theory=expected_entropy), uniform),
             "Parallel to ln n: attention spreads over all keys. Level: it does not.", log_x=True),
        Plot("Causal rows", "keys", "mean entropy, nats", causal.curves("length", "entropy", "rule"),
             "Each row sees its own prefix; log n counts its keys, YaRN the whole context.", log_x=True),
        Plot("Weight of one leading key", "keys", "its weight",
             leading.curves("length", "weight", "rule", theory=leading_weight),
             f"One score of {LEAD:g}, all others {OTHERS:g}: softmax forgets it as the context grows.", log_x=True),
    ]  # fmt: skip


EXPERIMENT = Experiment("length", "How does attention spread over a growing context under 1/√d_k, log n and YaRN?",
                        grid, run, conclude, seeds=16, quick_seeds=8, version=2, core_minutes=0.072)  # fmt: skip
