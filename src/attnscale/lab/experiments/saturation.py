"""Saturation of softmax: one large score among zeros, and Gaussian scores of every spread."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from attnscale.lab.experiment import Check, Conclusion, Curve, Experiment, Outcome, Plot, Settings, Table, product
from attnscale.lab.outcomes import Band, Outcomes, band, column, ranging, tally
from attnscale.measure import score_stats
from attnscale.operator import attention_weights
from attnscale.theory import critical_spread, expected_softmax, saturation_point

TABLES, ROWS = 16, 128  # number in a cell
ONE, MANY = "one large score", "Gaussian scores"
SATURATED = 0.99
SCORES = np.linspace(0.0, 20.0, 81)  # values of the one large score
TITLES = {"entropy_ratio": "entropy", "top1": "the largest weight", "jacobian_trace": "1 − Σp²"}


def grid(quick: bool) -> Sequence[Settings]:
    """List one large score over several numbers of keys, and every spread over each of them."""
    if quick:
        lengths, spreads = [4, 128, 1024], [0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0]
    else:
        lengths, spreads = [4, 16, 128, 1024, 4096], [0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0]
    return product(part=ONE, keys=lengths) + product(part=MANY, keys=lengths, spread=spreads)


def run(part: str, keys: int, seed: int, spread: float = 0.0) -> Outcome:
    """Measure the weight of one large score as it grows, or softmax over Gaussian scores."""
    if part == ONE:
        return _one_large_score(keys)
    # A query with a single component reads one component of every key: the scores are the numbers drawn.
    query, key = spread * torch.eye(ROWS).expand(TABLES, -1, -1), torch.randn(TABLES, keys, ROWS)
    stats = score_stats(query, key, scale=1.0)
    return {name: getattr(stats, name).mean().item() for name in (*TITLES, "saturated")}


def _one_large_score(keys: int) -> Outcome:
    key = torch.zeros(keys, 1, dtype=torch.float64)
    key[torch.randint(keys, ())] = 1.0  # the position does not change the softmax
    weight = (attention_weights(torch.from_numpy(SCORES)[:, None], key, scale=1.0) @ key)[:, 0]
    # ln(p/(1 − p)) is linear in the score, so interpolation finds where the weight passes 0.99
    passes = np.interp(math.log(SATURATED / (1 - SATURATED)), torch.logit(weight).numpy(), SCORES)
    return {"weight": weight.tolist(), "saturates": float(passes)}


def expected(measure: str, keys: int, spread: float) -> float:
    """Return the theoretical value of a measure over Gaussian scores."""
    return float(getattr(expected_softmax(spread, keys), measure))


def conclude(outcomes: Outcomes) -> Conclusion:
    """Describe where softmax saturates for each number of keys."""
    one, many = outcomes.where(part=ONE), outcomes.where(part=MANY)
    lengths = many.values("keys")
    checks = [*_checks_of_one(one), *_checks_of_many(many)]
    at99 = {keys: one.band("saturates", keys=keys).mean for keys in lengths}
    halves = {keys: _halved(many, keys) for keys in lengths}
    few, most = lengths[0], lengths[-1]
    text = (
        f"softmax([x, 0, …, 0]) gives its first key {SATURATED:.0%} of the weight from x = {at99[few]:.2f} on over "
        f"{few} keys and from {at99[most]:.2f} on over {most}: the more keys, the larger the score must be. Over "
        f"Gaussian scores 1 − Σp² falls to half at a spread of {halves[few].mean:.2f} ({few} keys) to "
        f"{halves[most].mean:.2f} ({most} keys), "
        f"{ranging((halves[keys].mean / critical_spread(keys) for keys in lengths), 2)} times the critical spread "
        f"√(2 ln n). {tally(checks)}"
    )
    tables = (
        Table("Where softmax saturates", ("keys", "x at 99%", "critical spread", "1 − Σp² halved at spread", "±"),
              tuple((keys, at99[keys], critical_spread(keys), half.mean, half.margin)
                    for keys, half in halves.items())),
        many.table("Gaussian scores", {"keys": "keys", "spread": "spread"},
                   {"entropy_ratio": "entropy (share of max)", "top1": "top-1", "jacobian_trace": "1 − Σp²",
                    "saturated": "saturated rows"}),
    )  # fmt: skip
    return Conclusion(text, checks, tables, _plots(one, many))


def _halved(many: Outcomes, keys: int) -> Band:
    """Return the spread at which 1 − Σp² is half of its maximum 1 − 1/n, over seeds."""
    own, level, found = many.where(keys=keys), (1 - 1 / keys) / 2, []
    for seed in own.values("seed"):
        falling = [-gain for gain in own.samples("jacobian_trace", seed=seed)]
        found.append(math.exp(np.interp(-level, falling, np.log(own.values("spread")))))
    return band(found)


def _checks_of_one(one: Outcomes) -> list[Check]:
    off = max(abs(found["saturates"] - saturation_point(int(own["keys"] or 0), SATURATED)) for own, found in one)
    closed = {keys: 1 / (1 + (keys - 1) * np.exp(-SCORES)) for keys in one.values("keys")}
    weights = max(float(abs(np.array(found["weight"]) - closed[own["keys"]]).max()) for own, found in one)
    return [
        Check(f"softmax([x, 0, …, 0]) reaches {SATURATED:.0%} at x = ln({SATURATED:g} (n − 1)/{1 - SATURATED:.2g})",
              off < 1e-6, f"{len(closed)} numbers of keys, largest difference {off:.1g}"),
        Check("its first weight is 1/(1 + (n − 1) e⁻ˣ)", weights < 1e-9,
              f"{len(SCORES)} scores over {len(closed)} numbers of keys, largest difference {weights:.1g}"),
    ]  # fmt: skip


def _checks_of_many(many: Outcomes) -> list[Check]:
    lengths = many.values("keys")
    return [
        many.check(f"{title} over {keys} Gaussian scores matches theory", name, partial(expected, name, keys), "spread",
                   len(lengths) * len(TITLES), keys=keys)
        for name, title in TITLES.items() for keys in lengths
    ]  # fmt: skip


def _plots(one: Outcomes, many: Outcomes) -> tuple[Plot, ...]:
    names = {keys: f"{keys} keys" for keys in many.values("keys")}

    first = {own["keys"]: found["weight"] for own, found in reversed(one.cells)}
    single = tuple(Curve(names[keys], tuple(SCORES.tolist()), column(first[keys])) for keys in names)

    def many_curves(measure: str) -> tuple[Curve, ...]:
        return many.curves("spread", measure, "keys", names=names, theory=partial(expected, measure))

    return (
        Plot("softmax([x, 0, …, 0])", "x", "weight of the first key", single,
             "The same curve, moved to the right by ln n."),
        Plot("Entropy against spread", "spread σ of the scores", "entropy / ln n", many_curves("entropy_ratio"),
             "1: all keys have the same weight. 0: one key has all of it.", log_x=True),
        Plot("1 − Σp² against spread", "spread σ of the scores", "1 − Σp²", many_curves("jacobian_trace"),
             "Mean over rows; it is 0 in a row where one key has all the weight.", log_x=True),
    )  # fmt: skip


EXPERIMENT = Experiment("saturation", "Where does softmax saturate, by spread and number of keys?", grid, run, conclude,
                        seeds=16, quick_seeds=8, version=2, core_minutes=0.28)  # fmt: skip
