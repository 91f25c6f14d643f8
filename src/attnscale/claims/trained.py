"""What training shows: small models at several head sizes, the bundled one, and the gradient before the first step."""

import math
from functools import cache

from attnscale.lab.experiment import Cell, Outcome, Settings
from attnscale.lab.experiments.gradients import MODEL
from attnscale.lab.experiments.trained import bundled_loss
from attnscale.lab.sweep import run_cell
from attnscale.lab.tasks import TASKS, Characters
from attnscale.lab.training import SCALES, Schedule, one_thread, score_summary, seeded_model, trained
from attnscale.models import load_bundled

TASK = TASKS["easy recall"]
HEAD_DIMS = (4, 16, 64, 256)
STEPS, RATE = 80, 0.005
HOT = 100  # times that rate
LEARNED = 0.1  # nats under guessing: something was learned
DEEP, WIDE = 8, 256  # layers and d_k of the model whose gradients are looked at
TEXT = math.log(256)  # nats: guessing a byte


@cache
def final_loss(head_dim: int, scale: str = "1/√d_k", rate: float = RATE) -> float:
    """The loss on unseen sequences of a small model, trained to recall pairs, one of SCALES in place."""
    model = seeded_model(TASK.vocabulary, 0, d_model=32, heads=1, head_dim=head_dim, scale=SCALES[scale])
    with one_thread():
        return trained(model, TASK, Schedule(STEPS, rate)).end


def has_learned(loss: float) -> bool:
    """Whether a loss is a number, and under that of guessing."""
    return loss < TASK.chance - LEARNED


@cache
def bundled(scale: str) -> float:
    """The loss of the bundled model, trained with 1/√d_k, on text held out, under one of SCALES."""
    with one_thread():
        return bundled_loss(scale)


@cache
def bundled_scores() -> dict[str, float]:
    """Spread and largest score of the bundled model on text held out."""
    model, _ = load_bundled()
    with one_thread():
        return score_summary(model, Characters(model.context), size=1)


@cache
def gradients(scale: str) -> Outcome:
    """What reaches the queries and W_q of a deep model with wide heads before its first step, as the lab measures."""
    settings: Settings = {"part": MODEL, "layers": DEEP, "head_dim": WIDE, "scale": scale, "seed": 0}
    return run_cell(Cell("gradients", 3, settings)).outcome
