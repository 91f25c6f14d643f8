"""Trained models for the claims: small ones at several head sizes, the bundled one, and a deep one before training."""

import math
from functools import cache

from attnscale.lab.experiment import Cell, Settings
from attnscale.lab.experiments.gradients import MODEL
from attnscale.lab.experiments.trained import PARTS, bundled_loss
from attnscale.lab.outcomes import Band, band
from attnscale.lab.sweep import run_cell
from attnscale.lab.tasks import TASKS, Characters
from attnscale.lab.training import SCALES, Schedule, one_thread, score_summary, seeded_model, trained
from attnscale.models import load_bundled

TASK = TASKS["easy recall"]
HEAD_DIMS = (4, 16, 64, 256)
STEPS, RATE, SEEDS = 80, 0.005, 5
HOT = 100  # times that rate
LEARNED = 0.1  # nats below guessing
DEEP, WIDE = 8, 256  # layers and d_k of the model whose gradients are measured
TEXT = math.log(256)  # nats, for guessing a byte


@cache
def final_losses(head_dim: int, scale: str, rate: float, steps: int) -> list[float]:
    """Train small models to recall pairs, with one of SCALES, and return the loss on unseen sequences of each seed."""
    losses = []
    for seed in range(SEEDS):
        model = seeded_model(TASK.vocabulary, seed, d_model=32, heads=1, head_dim=head_dim, scale=SCALES[scale])
        with one_thread():
            losses.append(trained(model, TASK, Schedule(steps, rate, seed)).end)
    return losses


def final_loss(head_dim: int, scale: str = "1/√d_k", rate: float = RATE) -> Band:
    """Return the loss of such models over seeds."""
    return band(final_losses(head_dim, scale, rate, STEPS))


def extra_loss(head_dim: int, scale: str, steps: int = 2 * STEPS) -> Band:
    """Return how much more a scale loses than 1/√d_k, paired by seed."""
    pairs = zip(*(final_losses(head_dim, each, RATE, steps) for each in (scale, "1/√d_k")), strict=True)
    return band(own - root for own, root in pairs)


def has_learned(loss: Band) -> bool:
    """Return True if a loss is a number below that of guessing."""
    return loss.high < TASK.chance - LEARNED


@cache
def bundled(scale: str) -> Band:
    """Return the loss of the bundled model, trained with 1/√d_k, under one of SCALES, over parts of held-out text."""
    with one_thread():
        return band(bundled_loss(scale, part) for part in range(PARTS))


@cache
def bundled_scores() -> dict[str, float]:
    """Return spread and largest score of the bundled model on held-out text."""
    model, _ = load_bundled()
    with one_thread():
        return score_summary(model, Characters(model.context), size=1)


@cache
def gradients(scale: str) -> dict[str, Band]:
    """Measure the gradient on W_q of deep models with wide heads before training, as the lab does."""
    settings: Settings = {"part": MODEL, "layers": DEEP, "head_dim": WIDE, "scale": scale}
    found = [run_cell(Cell("gradients", 4, {**settings, "seed": seed})).outcome for seed in range(SEEDS)]
    return {name: band(each[name] for each in found) for name in ("first_query", "backwards")}
