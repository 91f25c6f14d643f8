"""The demo: two models alike to the last weight, one of which divides its scores by √d_k, learn the same thing."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attnscale.diagnose import Audit, audit
from attnscale.lab.shares import Shares, along, query_shares
from attnscale.lab.tasks import Recall
from attnscale.lab.threads import one_thread
from attnscale.lab.training import HEADS, LAYERS, Schedule, Step, held_out_loss, seeded_model, training, without_alarms
from attnscale.lab.twins import TwinRun, Twins
from attnscale.lab.wording import percent
from attnscale.theory import freezing_point
from attnscale.train import Monitor
from attnscale.train.record import Record

SCALES = {"scaled by 1/√d_k": "inverse_sqrt", "unscaled": "unscaled"}
TASK = Recall(pairs=4, rounds=4, keys=8, values=8)
RATE = 0.003
EVERY = 10  # steps between two looks at the scores
PULLED = 64  # sequences whose loss pulls at the queries before the first step
LEARNED = 0.1  # nats: nine answers of ten right
APART = 0.1  # nats between two losses that are worth calling different


@dataclass(frozen=True)
class Demo:
    """What is trained: heads of this size, for so many steps, from this seed."""

    head_dim: int = 128
    steps: int = 160
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
        with one_thread():
            self.received = {name: query_shares(model, TASK.held_out(PULLED))[0] for name, model in self.models.items()}

    def steps(self) -> Iterator[dict[str, Step]]:
        """Train both, a step of each at a time, on the same batches."""
        schedule = Schedule(self.demo.steps, RATE, seed=self.demo.seed)
        runs = {
            name: training(model, TASK, schedule, Monitor(model, every=EVERY, rows=None))
            for name, model in self.models.items()
        }
        while pair := _next_of(runs):
            for name, step in pair.items():
                self.losses[name].append((step.number, step.loss))
                if step.record is not None:
                    self.records[name].append(step.record)
            yield pair

    @one_thread()
    def twins(self) -> Twins:
        """What happened, and why."""
        batch = TASK.held_out(4).tokens
        held_out = {name: held_out_loss(model, TASK) for name, model in self.models.items()}
        runs = tuple(
            TwinRun(
                name,
                tuple(self.losses[name]),
                tuple(self.records[name]),
                _audited(model, batch),
                tuple(zip(along(), self.received[name].curve, strict=True)),
                held_out[name],
            )
            for name, model in self.models.items()
        )
        scaled, unscaled = (held_out[name] for name in SCALES)
        return Twins(
            title=f"Why √d_k: the same model with and without it, d_k = {self.demo.head_dim}",
            verdict=verdict(scaled, unscaled),
            explanation=explanation(self.demo, self.records, self.received, unscaled),
            runs=runs,
            settings=self._settings(),
        )

    def _settings(self) -> dict[str, object]:
        return {
            "model": f"{LAYERS} layers, {HEADS} heads of d_k {self.demo.head_dim}, rotary positions, the same first "
            "weights and batches",
            "task": f"which of {TASK.values} values goes with this key: {TASK.pairs} pairs a sequence, told "
            f"{TASK.rounds} times over",
            "training": f"{self.demo.steps} steps of 16 sequences, Adam at {RATE:g}, seed {self.demo.seed}",
            "measured": f"every row of every head, every {EVERY} steps; before the first step, the gradient of "
            f"{PULLED} unseen sequences on the first layer's queries, on all of which their loss depends",
            "loss of guessing any value": TASK.chance,
            "loss of guessing among those told": math.log(TASK.pairs),
        }


def _next_of(runs: dict[str, Iterator[Step]]) -> dict[str, Step]:
    """A step of each run that goes on; between two of them torch has its threads."""
    with without_alarms(), one_thread():
        return {name: step for name, run in runs.items() if (step := next(run, None)) is not None}


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


def explanation(
    demo: Demo, records: dict[str, list[Record]], received: dict[str, Shares], unscaled_loss: float
) -> tuple[str, ...]:
    """How the first scores, the softmax over them and the gradient explain it; every number is measured, and once."""
    with_scale, without = SCALES
    first = {name: own[0] for name, own in records.items()}
    keys = 2 * TASK.pairs * TASK.rounds - 1
    spread, entropy = (
        {name: record.whole(number) for name, record in first.items()} for number in ("spread", "entropy_ratio")
    )
    side = "past" if spread[without] > freezing_point(keys) else "under"
    paragraphs = [
        f"Before the first step the unscaled scores spread by {spread[without]:.1f}, close to √{demo.head_dim}; "
        f"divided by it they spread by {spread[with_scale]:.2f}. Softmax over {keys} keys freezes at √(2 ln {keys}) = "
        f"{freezing_point(keys):.1f}: the unscaled model starts {side} it, its rows with an entropy of "
        f"{entropy[without]:.0%} of a uniform row's, against {entropy[with_scale]:.0%}.",
        on_gradient(received[with_scale], received[without]),
    ]
    if abs(unscaled_loss - math.log(TASK.pairs)) < APART:
        paragraphs.append(
            f"Its loss is about that of guessing among the {TASK.pairs} values that occur in a sequence: it learned "
            "which values were told, and not which of them belongs to which key."
        )
    return tuple(paragraphs)


def on_gradient(scaled: Shares, unscaled: Shares) -> str:
    """Whether without a scale less gradient reaches the queries, or less evenly, as it was measured."""
    times = unscaled.root_mean_square / scaled.root_mean_square
    size = f"{times:.2g} times as large" if times >= 1 else f"only {times:.2g} times as large"
    uneven = unscaled.quiet_half < scaled.quiet_half and unscaled.loud_tenth > scaled.loud_tenth
    halves = (
        f"the half of the queries that receives least has {percent(unscaled.quiet_half)} of it, against "
        f"{scaled.quiet_half:.0%}, and the tenth that receives most {unscaled.loud_tenth:.0%}, against "
        f"{scaled.loud_tenth:.0%}"
    )
    lead = "not gone, it is uneven" if times >= 1 and uneven else "less even" if uneven else "no less even"
    return (
        f"The gradient is {lead}. In root mean square what reaches the first layer's queries is {size} as with the "
        f"scale; {halves}." + (" Few queries learn, and the others are carried along." if uneven else "")
    )


def _audited(model: torch.nn.Module, tokens: torch.Tensor) -> Audit:
    with torch.no_grad():
        return audit(model, tokens)
