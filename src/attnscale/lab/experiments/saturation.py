"""Where softmax saturates: over one large score among zeros, and over Gaussian scores of every spread."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from attnscale.lab.bands import LEVEL, Band, band, student_quantile
from attnscale.lab.cell import Outcome, Settings
from attnscale.lab.experiment import Conclusion, Experiment
from attnscale.lab.outcomes import Outcomes
from attnscale.lab.result import Check, Curve, Heatmap, Plot, Table, column
from attnscale.lab.wording import ranging, tally
from attnscale.measure import score_stats
from attnscale.operator import attention_weights
from attnscale.theory import expected_softmax, freezing_point, saturation_point

TABLES, ROWS = 16, 128  # a cell: as many rows a table as the published one below has
ONE, MANY = "one large score", "Gaussian scores"
SATURATED = 0.99
SCORES = np.linspace(0.0, 20.0, 81)  # of the one large score
MEASURES = ("entropy_ratio", "top1", "gradient_gain")
UNSCALED_64 = 8.0  # the spread of q·k at d_k = 64
# transformers issue 45676, RMS-normalised q and k, 128 keys: spread -> bits of entropy
PUBLISHED_KEYS, PUBLISHED_BITS = 128, {16.0: 0.433, 1.0: 6.30}
ASYMPTOTE = 0.05  # of ln n: how well H ≈ ln n − σ²/2 is held to do below half the freezing point


def grid(quick: bool) -> Sequence[Settings]:
    """One large score over some numbers of keys; every spread over every number of keys."""
    lengths = [4, 128, 1024] if quick else [4, 16, 128, 1024, 4096]
    spreads = (
        [0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0]
        if quick
        else [0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0]
    )
    one: list[Settings] = [{"part": ONE, "keys": keys} for keys in lengths]
    many: list[Settings] = [{"part": MANY, "keys": keys, "spread": spread} for keys in lengths for spread in spreads]
    return one + many


def run(part: str, keys: int, seed: int, spread: float = 0.0) -> Outcome:
    """The weight of one large score as it grows; or what a softmax over Gaussian scores does, row by row."""
    if part == ONE:
        return _one_large_score(keys)
    # A query with one component left reads one component of every key: the scores are the numbers drawn.
    query, key = spread * torch.eye(ROWS).expand(TABLES, -1, -1), torch.randn(TABLES, keys, ROWS)
    stats = score_stats(query, key, scale=1.0)
    bits = stats.entropy / math.log(2)
    measured = {name: getattr(stats, name).mean().item() for name in (*MEASURES, "entropy", "saturated")}
    return {**measured, "bits": bits.tolist()}


def _one_large_score(keys: int) -> Outcome:
    key = torch.zeros(keys, 1, dtype=torch.float64)
    key[torch.randint(keys, ())] = 1.0  # softmax knows no order
    query = torch.from_numpy(SCORES)[:, None]
    weight = (attention_weights(query, key, scale=1.0) @ key)[:, 0]
    # ln(p/(1 − p)) is linear in the score: interpolating it finds where the weight passes 0.99
    passes = np.interp(math.log(SATURATED / (1 - SATURATED)), torch.logit(weight).numpy(), SCORES)
    return {"weight": weight.tolist(), "gradient": (weight * (1 - weight)).tolist(), "saturates": float(passes)}


def conclude(outcomes: Outcomes) -> Conclusion:
    """Where it saturates, by how many keys there are, and whether the closed forms say so."""
    one, many = outcomes.where(part=ONE), outcomes.where(part=MANY)
    lengths, spreads = many.values("keys"), many.values("spread")
    checks = [*_checks_of_one(one), *_checks_of_many(many)]
    halves = {keys: _halved(many, keys) for keys in lengths}
    slope = np.polyfit([math.log(keys - 1) for keys in lengths], [_saturates(one, keys) for keys in lengths], 1)[0]
    few, most = lengths[0], lengths[-1]
    moves = ", so no fixed score saturates every softmax" if slope > 0.5 else ""
    text = (
        f"softmax([x, 0, …, 0]) gives its first key {SATURATED:.0%} from x = {_saturates(one, few):.2f} on over {few} "
        f"keys and from {_saturates(one, most):.2f} over {most}: x grows by {slope * math.log(10):.2f} with every "
        f"tenfold of keys{moves}. Over Gaussian scores 1 − Σp² is halved at a spread of "
        f"{halves[few].mean:.2f} ({few} keys) to {halves[most].mean:.2f} ({most} keys), "
        f"{ranging((halves[keys].mean / freezing_point(keys) for keys in lengths), 2)} times the freezing point "
        f"√(2 ln n). " + _unscaled(many, spreads, lengths) + tally(checks)
    )
    points = (
        "Where softmax saturates",
        ("keys", "x at 99%", "freezing point", "gradient halved at spread", "±"),
        [(keys, _saturates(one, keys), freezing_point(keys), halves[keys].mean, halves[keys].half) for keys in lengths],
    )
    shown = [spread for spread in spreads if spread in (1.0, 2.0, 4.0, UNSCALED_64, 16.0)]
    names = (*MEASURES, "saturated")
    spread_out = (
        "Gaussian scores",
        ("keys", "spread", "H / ln n", "top-1", "1 − Σp²", "rows over 0.99"),
        [(keys, spread, *(many.band(name, keys=keys, spread=spread).mean for name in names))
         for keys in lengths for spread in shown],
    )  # fmt: skip
    tables = tuple(Table(title, columns, tuple(rows)) for title, columns, rows in (points, spread_out))
    return Conclusion(text, tuple(checks), tables, _plots(one, many))


def _saturates(one: Outcomes, keys: int) -> float:
    return one.band("saturates", keys=keys).mean


def _halved(many: Outcomes, keys: int) -> Band:
    """The spread at which the gradient gain has fallen to half of 1 − 1/n, seed by seed."""
    own = many.where(keys=keys)
    level = (1 - 1 / keys) / 2
    spreads = own.values("spread")
    found = []
    for seed in own.values("seed"):
        gains = [own.samples("gradient_gain", seed=seed, spread=spread)[0] for spread in spreads]
        found.append(math.exp(np.interp(-level, [-gain for gain in gains], np.log(spreads))))
    return band(found)


def _unscaled(many: Outcomes, spreads: Sequence[float], lengths: Sequence[int]) -> str:
    if UNSCALED_64 not in spreads:
        return ""
    keys = 1024 if 1024 in lengths else lengths[-1]
    gain, top1, saturated = (
        many.band(name, keys=keys, spread=UNSCALED_64) for name in ("gradient_gain", "top1", "saturated")
    )
    return (
        f"A spread of {UNSCALED_64:g}, that of unscaled d_k = 64, has a 1 − Σp² of {gain.mean:.2f} over {keys} "
        f"keys; the largest weight is {top1.mean:.2f} on average and over {SATURATED:g} in {saturated.mean:.0%} of "
        f"rows, so that it is {'one-hot' if saturated.mean > 0.5 else 'far from one-hot in most rows'}. "
    )


def _checks_of_one(one: Outcomes) -> list[Check]:
    lengths = one.values("keys")
    off = max(abs(_saturates(one, keys) - saturation_point(keys, SATURATED)) for keys in lengths)
    weights = max(
        abs(weight - 1 / (1 + (own["keys"] - 1) * math.exp(-x)))  # type: ignore[operator]
        for own, found in one
        for x, weight in zip(SCORES, found["weight"], strict=True)
    )
    return [
        Check(f"softmax([x, 0, …, 0]) reaches {SATURATED:.0%} at x = ln({SATURATED:g} (n − 1)/{1 - SATURATED:.2g})",
              off < 1e-6, f"{len(lengths)} numbers of keys, off by at most {off:.1g}"),
        Check("its first weight is 1/(1 + (n − 1) e⁻ˣ)", weights < 1e-9,
              f"{len(SCORES)} scores over {len(lengths)} numbers of keys, off by at most {weights:.1g}"),
    ]  # fmt: skip


def _checks_of_many(many: Outcomes) -> list[Check]:
    lengths, spreads = many.values("keys"), many.values("spread")
    titles = {"entropy_ratio": "H/ln n", "top1": "top-1", "gradient_gain": "1 − Σp²"}
    curves = len(lengths) * len(MEASURES)
    checks = [
        many.check(f"{titles[name]} over {keys} Gaussian scores is its exact expectation", name,
                   {spread: getattr(expected_softmax(spread, keys), name) for spread in spreads}, "spread", curves,
                   keys=keys)
        for name in MEASURES for keys in lengths
    ]  # fmt: skip
    early = [(keys, spread) for keys in lengths for spread in spreads if spread <= freezing_point(keys) / 2]
    departures = [
        abs(many.band("entropy", keys=keys, spread=spread).mean - math.log(keys) + spread**2 / 2) / math.log(keys)
        for keys, spread in early
    ]
    checks.append(
        Check(f"below half the freezing point H ≈ ln n − σ²/2, to {ASYMPTOTE:.0%} of ln n",
              max(departures) < ASYMPTOTE, f"{len(early)} points, off by at most {max(departures):.1%} of ln n")
    )  # fmt: skip
    return checks + [
        _published(many, spread, bits)
        for spread, bits in PUBLISHED_BITS.items()
        if PUBLISHED_KEYS in lengths and spread in spreads
    ]


def _published(many: Outcomes, spread: float, bits: float) -> Check:
    """Whether a published table of as many rows is one that could be drawn here."""
    tables = [bits for _, found in many.where(keys=PUBLISHED_KEYS, spread=spread) for bits in found["bits"]]
    middle, deviation = float(np.mean(tables)), float(np.std(tables, ddof=1))
    reach = student_quantile(len(tables) - 1, 1 - (1 - LEVEL) / len(PUBLISHED_BITS)) * deviation
    statement = f"{bits} bits of entropy at spread {spread:g} over {PUBLISHED_KEYS} keys, as published for RMS-norms"
    evidence = f"{len(tables)} tables of {ROWS} rows gave {middle:.3f} bits, 95% of them within ±{reach:.3f}"
    return Check(statement, abs(middle - bits) <= reach, evidence)


def _plots(one: Outcomes, many: Outcomes) -> tuple[Plot | Heatmap, ...]:
    lengths, spreads = many.values("keys"), many.values("spread")

    def single(measure: str) -> tuple[Curve, ...]:
        first = {own["keys"]: found[measure] for own, found in reversed(one.cells)}
        return tuple(Curve(f"{keys} keys", column(list(SCORES)), column(first[keys])) for keys in lengths)  # type: ignore[arg-type]

    def both(measure: str, frozen: bool = False) -> tuple[Curve, ...]:
        curves = []
        for keys in lengths:
            unit = freezing_point(keys) if frozen else 1.0
            found = many.curve(f"{keys} keys", "spread", measure, keys=keys)
            along = tuple(spread / unit for spread in found.x)
            theory = [getattr(expected_softmax(spread, keys), measure) for spread in spreads]
            curves += [
                Curve(found.name, along, found.y, found.low, found.high),
                Curve(f"{keys} keys, expected", along, column(theory), is_theory=True),
            ]
        return tuple(curves)

    top1 = [[many.band("top1", keys=keys, spread=spread).mean for spread in spreads] for keys in lengths]
    return (
        Plot("softmax([x, 0, …, 0])", "x", "weight of the first key", single("weight"),
             "One curve, moved to the right by ln n: the more keys, the larger a score must be."),
        Plot("Its gradient", "x", "p (1 − p)", single("gradient"),
             "Learning happens on the slope: left of it nothing stands out, right of it nothing moves."),
        Plot("Entropy against spread", "spread σ of the scores", "H / ln n", both("entropy_ratio"),
             "Dashes are the expectation, not a fit: 1 is all keys alike, 0 one key alone.", log_x=True),
        Plot("Largest weight against the freezing point", "σ / √(2 ln n)", "top-1", both("top1", frozen=True),
             "In units of the freezing point, with many keys or few.", log_x=True),
        Plot("Gradient gain against spread", "spread σ of the scores", "1 − Σp²", both("gradient_gain"),
             "On average over rows, which differ: 0 in a row where one key has taken all.", log_x=True),
        Heatmap("Largest weight", "spread σ", "keys", tuple(spreads), tuple(lengths),
                tuple(column(row) for row in top1), "Bright: one key takes most."),
    )  # fmt: skip


EXPERIMENT = Experiment("saturation", "Where does softmax saturate, by spread and number of keys?", grid, run, conclude,
                        seeds=16, quick_seeds=8, core_minutes=0.59)  # fmt: skip
