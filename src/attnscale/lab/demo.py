"""The demo: two models alike to the last weight, one of which divides its scores by √d_k, learn the same thing."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attnscale.diagnose import Audit, audit
from attnscale.lab.tasks import Recall
from attnscale.lab.training import HEADS, LAYERS, Schedule, Step, held_out_loss, seeded_model, training, without_alarms
from attnscale.lab.twins import TwinRun, Twins
from attnscale.theory import expected_softmax, freezing_point
from attnscale.train import Monitor
from attnscale.train.record import Record

SCALES = {"scaled by 1/√d_k": "inverse_sqrt", "unscaled": "unscaled"}
TASK = Recall(pairs=4, rounds=4, keys=8, values=8)
RATE = 0.003
EVERY = 10  # steps between two looks at the scores
LEARNED = 0.1  # nats: nine answers of ten right
APART = 0.1  # nats between two losses that are worth calling different


@dataclass(frozen=True)
class Demo:
    """What is trained: heads of this size, for so many steps, from this seed."""

    head_dim: int = 128
    steps: int = 300
    seed: int = 0


class TwinTraining:
    """Both twins in training."""

    def __init__(self, demo: Demo) -> None:
        self.demo = demo
        self.models = {
            name: seeded_model(TASK.vocabulary, demo.seed, head_dim=demo.head_dim, scale=scale)
            for name, scale in SCALES.items()
        }
        self.losses: dict[str, list[tuple[int, float]]] = {name: [] for name in SCALES}
        self.records: dict[str, list[Record]] = {name: [] for name in SCALES}

    def steps(self) -> Iterator[dict[str, Step]]:
        """Train both, a step of each at a time, on the same batches."""
        schedule = Schedule(self.demo.steps, RATE, seed=self.demo.seed)
        runs = {
            name: training(model, TASK, schedule, Monitor(model, every=EVERY, rows=None))
            for name, model in self.models.items()
        }
        with without_alarms():
            while pair := {name: step for name, run in runs.items() if (step := next(run, None)) is not None}:
                for name, step in pair.items():
                    self.losses[name].append((step.number, step.loss))
                    if step.record is not None:
                        self.records[name].append(step.record)
                yield pair

    def twins(self) -> Twins:
        """What happened, and why."""
        batch = TASK.held_out(4).tokens
        runs = tuple(
            TwinRun(name, tuple(self.losses[name]), tuple(self.records[name]), _audited(model, batch))
            for name, model in self.models.items()
        )
        held_out = {name: held_out_loss(model, TASK) for name, model in self.models.items()}
        scaled, unscaled = (held_out[name] for name in SCALES)
        return Twins(
            title=f"Why √d_k: the same model with and without it, d_k = {self.demo.head_dim}",
            verdict=verdict(scaled, unscaled),
            explanation=explanation(self.demo, self.records, unscaled),
            runs=runs,
            settings=self._settings(held_out),
        )

    def _settings(self, held_out: dict[str, float]) -> dict[str, object]:
        return {
            "model": f"{LAYERS} layers, {HEADS} heads of d_k {self.demo.head_dim}, rotary positions, the same first "
            "weights and batches",
            "task": f"which of {TASK.values} values goes with this key: {TASK.pairs} pairs a sequence, told "
            f"{TASK.rounds} times over",
            "training": f"{self.demo.steps} steps of 16 sequences, Adam at {RATE:g}, seed {self.demo.seed}",
            "measured": f"every row of every head, every {EVERY} steps",
            "loss of guessing any value": TASK.chance,
            "loss of guessing among those told": math.log(TASK.pairs),
            **{f"loss on unseen sequences, {name}": loss for name, loss in held_out.items()},
        }


def verdict(scaled: float, unscaled: float) -> str:
    """What the losses on unseen sequences say, whichever way they fell."""
    if not math.isfinite(unscaled) and math.isfinite(scaled):
        return f"Without 1/√d_k training broke down; with it the loss is {scaled:.3g}."
    if scaled < LEARNED <= unscaled - APART:
        return f"With 1/√d_k the model learned the task (loss {scaled:.2g}); without it, it did not ({unscaled:.2f})."
    if scaled < unscaled - APART:
        return f"With 1/√d_k the loss came to {scaled:.2f}, without it only to {unscaled:.2f}."
    if unscaled < scaled - APART:
        return f"Here the unscaled model did better: {unscaled:.2f} against {scaled:.2f}."
    return f"No difference here: {scaled:.2f} with 1/√d_k, {unscaled:.2f} without."


def explanation(demo: Demo, records: dict[str, list[Record]], unscaled_loss: float) -> tuple[str, ...]:
    """How the first scores, the softmax over them and the gradient explain it; every number is measured or exact."""
    first, last = ({name: own[at] for name, own in records.items()} for at in (0, -1))
    keys = 2 * TASK.pairs * TASK.rounds - 1
    with_scale, without = SCALES
    expected = expected_softmax(math.sqrt(demo.head_dim), keys)
    spread, gain, entropy = (
        {name: record.whole(number) for name, record in first.items()}
        for number in ("spread", "gradient_gain", "entropy_ratio")
    )
    end = {name: record.whole("gradient_gain") for name, record in last.items()}
    side = "past" if spread[without] > freezing_point(keys) else "under"
    paragraphs = [
        f"Before the first step the unscaled scores spread by {spread[without]:.1f}, close to "
        f"√{demo.head_dim} = {math.sqrt(demo.head_dim):.1f}; divided by it they spread by {spread[with_scale]:.2f}. "
        f"Softmax over {keys} keys freezes at a spread of √(2 ln {keys}) = {freezing_point(keys):.1f}: the unscaled "
        f"model starts {side} it.",
        f"So its rows have an entropy of {entropy[without]:.0%} of a uniform row's, against {entropy[with_scale]:.0%}, "
        f"and of the gradient that a row passes back to its scores, 1 − Σp², {gain[without]:.0%} is left, against "
        f"{gain[with_scale]:.0%}. (Independent normal scores of spread {math.sqrt(demo.head_dim):.1f} over {keys} keys "
        f"would leave {expected.gradient_gain:.0%}.) At the end of training it is {end[without]:.0%} against "
        f"{end[with_scale]:.0%}.",
    ]
    told = math.log(TASK.pairs)
    if abs(unscaled_loss - told) < APART:
        paragraphs.append(
            f"Its loss of {unscaled_loss:.2f} is about that of guessing among the {TASK.pairs} values that occur in a "
            f"sequence, ln {TASK.pairs} = {told:.2f}: it learned which values were told, and not which of them "
            "belongs to which key."
        )
    return tuple(paragraphs)


def _audited(model: torch.nn.Module, tokens: torch.Tensor) -> Audit:
    with torch.no_grad():
        return audit(model, tokens)
