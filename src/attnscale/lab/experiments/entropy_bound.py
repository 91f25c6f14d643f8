"""Entropy of rows and its lower bound at a spread: σReparam's bound (arXiv:2303.06296, theorem 3.1)."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from attnscale.lab.experiment import Check, Conclusion, Curve, Experiment, Outcome, Plot, Settings, product
from attnscale.lab.outcomes import Outcomes, column, expected_curve, tally
from attnscale.lab.tasks import TASKS
from attnscale.lab.training import NAMES, SCALES, Schedule, seeded_run
from attnscale.reference import Array, row_statistics
from attnscale.rules import get_rule
from attnscale.theory import entropy_floor, expected_softmax
from attnscale.watching import watch

EXTREME, DRAWN, MODEL = "one key apart", "Gaussian rows", "model"
KEYS, ROWS, EXAMPLES = 32, 1024, 64
SLACK = 1e-6  # nats, for rounding


def grid(quick: bool) -> Sequence[Settings]:
    """List rows of every spread with one key apart from the others, Gaussian rows, and models under each scale."""
    if quick:
        spreads = [0.25, 1.0, 4.0]
        models = product(scale=SCALES, rate=0.01, task="easy recall", steps=40, d_model=32, heads=1)
    else:
        spreads = [0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0]
        models = product(scale=SCALES, rate=[0.001, 0.01], task="recall", steps=300, d_model=64, heads=2)
    rows = product(part=[EXTREME, DRAWN], spread=spreads)
    return rows + [{"part": MODEL, "head_dim": 64, **model} for model in models]


def run(part: str, seed: int, device: str = "cpu", **settings: Any) -> Outcome:
    """Measure spread and entropy of rows, and the distance of each row from its bound."""
    return _trained_rows(seed, device, **settings) if part == MODEL else _drawn_rows(part, **settings)


def _drawn_rows(part: str, spread: float) -> Outcome:
    scores = torch.randn(ROWS, KEYS, dtype=torch.float64)
    if part == EXTREME:
        scores = torch.nn.functional.one_hot(torch.randint(KEYS, (ROWS,)), KEYS).double()
    scores = scores - scores.mean(-1, keepdim=True)
    return measured((spread * scores / scores.std(-1, correction=0, keepdim=True)).numpy())


def _trained_rows(seed: int, device: str, scale: str, rate: float, task: str, steps: int, **shape: int) -> Outcome:
    of, schedule = TASKS[task], Schedule(steps, rate, seed)
    model, _, found = seeded_run(of, schedule, device, scale=SCALES[scale], **shape)
    with torch.no_grad(), watch(model, keep=True) as seen:
        of.held_out(EXAMPLES).loss(model)
    rows = []
    for layer in seen.layers.values():
        assert layer.query is not None and layer.key is not None  # noqa: PT018 (kept)
        query, key, multiplier = get_rule(SCALES[scale])(layer.query[:, :, -1:], layer.key)  # this row sees all keys
        rows.append((multiplier * query @ key.mT).flatten(0, 2).double().cpu().numpy())
    return {**measured(np.concatenate(rows)), "final": found.final, "keys": rows[0].shape[-1]}


def measured(scores: Array) -> Outcome:
    """Return means over rows, and the smallest distance of a row from its own bound."""
    entropy, spreads = row_statistics(scores).entropy, scores.std(-1)
    floors = [least_entropy(float(spread), scores.shape[-1]) for spread in spreads]
    above = entropy - floors
    return {"spread": float(spreads.mean()), "entropy": float(entropy.mean()), "floor": float(np.mean(floors)),
            "least": float(above.min()), "above": float(above.mean()), "rows": len(scores)}  # fmt: skip


def least_entropy(spread: float, keys: int) -> float:
    """Return the lowest entropy of a row of this spread: the norm of its centred scores is at most spread · √n."""
    return entropy_floor(spread * math.sqrt(keys), keys)


def conclude(outcomes: Outcomes) -> Conclusion:
    """Check that no row is below its bound, and compare random and trained rows with it."""
    extreme, drawn, models = (outcomes.where(part=part) for part in (EXTREME, DRAWN, MODEL))
    rows, least = sum(found["rows"] for _, found in outcomes), min(found["least"] for _, found in outcomes)
    tight = max(abs(found["above"]) for _, found in extreme)
    checks = [
        Check("no row has less entropy than its spread allows", least > -SLACK,
              f"{rows:,} rows, of which the nearest is {least:.2g} nats above its bound"),
        Check("a row with one key apart from the others reaches the bound", tight < SLACK,
              f"largest difference {tight:.1g} nats"),
    ]  # fmt: skip
    text = " ".join([
        f"A row of spread 1 over {KEYS} keys has at least {least_entropy(1.0, KEYS):.2f} nats of entropy; Gaussian "
        f"scores of this spread leave {drawn.band('entropy', spread=1.0)}.",
        *(_sentence(models.where(scale=scale), scale) for scale in models.values("scale")), tally(checks),
    ])  # fmt: skip
    tables = [
        drawn.table(f"Entropy over {KEYS} keys, nats", {"spread": "spread"},
                    {"floor": "bound", "entropy": "Gaussian rows ±"}),
        models.table("Trained models, last row of each sequence", {"scale": "scale", "rate": "rate"},
                     {"keys": "keys", "spread": "spread ±", "entropy": "entropy, nats ±", "floor": "bound",
                      "final": "final loss ±"}),
    ]  # fmt: skip
    return Conclusion(text, checks, tables, [_plot(extreme, drawn, models)])


def _sentence(own: Outcomes, scale: str) -> str:
    rate = own.values("rate")[-1]
    spread, entropy, floor = (own.band(name, rate=rate) for name in ("spread", "entropy", "floor"))
    measured = f"spread {spread:.2g}, entropy {entropy:.2g}, bound {floor:.2g}"
    return f"Trained {NAMES[scale]} at a rate of {rate:g}: {measured}."


def _plot(extreme: Outcomes, drawn: Outcomes, models: Outcomes) -> Plot:
    spreads, curves = drawn.values("spread"), []
    for name, own, theory in (
        ("Gaussian rows", drawn, [expected_softmax(spread, KEYS).entropy for spread in spreads]),
        ("one key apart", extreme, [least_entropy(spread, KEYS) for spread in spreads]),
    ):
        curves += [own.curve(name, "spread", "entropy"), expected_curve(name, spreads, theory)]
    for scale in models.values("scale"):
        x, y = (tuple(models.samples(name, scale=scale)) for name in ("spread", "entropy"))
        curves.append(Curve(f"trained {NAMES[scale]}", x, column(y)))
    notice = f"No row of {KEYS} keys can be below the lowest curve; models see a few keys more."
    return Plot("Entropy against spread", "spread", "entropy, nats", tuple(curves), notice, log_x=True)


EXPERIMENT = Experiment(
    "entropy-bound", "How little entropy can scores of a given spread leave, and how near do models come?",
    grid, run, conclude, seeds=3, quick_seeds=2, trains=True, core_minutes=2.6,
)  # fmt: skip
