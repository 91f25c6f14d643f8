"""The demo: two models with the same weights, one of which divides its scores by √d_k, learn the same task."""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from attnscale.diagnose import Audit, audit
from attnscale.lab.outcomes import percent
from attnscale.lab.tasks import Recall
from attnscale.lab.training import (
    HEADS,
    LAYERS,
    SHARES,
    GradientShares,
    Schedule,
    Step,
    held_out_loss,
    one_thread,
    query_shares,
    seeded_model,
    training,
)
from attnscale.plain import plain
from attnscale.theory import critical_spread
from attnscale.train import Monitor
from attnscale.train.record import Record

SCALES = {"scaled by 1/√d_k": "inverse_sqrt", "unscaled": "unscaled"}
TASK = Recall(pairs=4, rounds=4, keys=8, values=8)
HEAD_DIM, STEPS, RATE = 128, 160, 0.003
EVERY = 10  # steps between two records
SEQUENCES = 64  # held-out sequences that give the gradient on the queries before the first step
LEARNED = 0.1  # nats: nine answers of ten are right
DIFFERENT = 0.1  # nats between two losses that count as different


@dataclass(frozen=True)
class TwinRun:
    """One of the runs: its losses, the records of its monitor, and an audit of the model at the end."""

    name: str  # the difference between the runs: "scaled by 1/√d_k"
    losses: tuple[tuple[int, float], ...]  # (step, loss)
    records: tuple[Record, ...] = ()
    audit: Audit | None = None
    received: tuple[tuple[float, float], ...] = ()  # (share of queries, smallest gradient first; share of the gradient)
    held_out: float | None = None  # loss at the end on examples that no run trained on


@dataclass(frozen=True)
class Twins:
    """Training runs that differ in one setting, with a verdict and an explanation composed from their numbers."""

    title: str
    verdict: str
    explanation: tuple[str, ...]  # paragraphs
    runs: tuple[TwinRun, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; a loss that is not finite is None."""
        found = {name: getattr(self, name) for name in ("title", "verdict", "explanation", "settings")}
        runs = []
        for run in self.runs:
            own = {name: getattr(run, name) for name in ("name", "losses", "held_out", "received")}
            findings = run.audit.findings if run.audit is not None else []
            own["records"] = [record.to_dict() for record in run.records]
            runs.append(own | {"findings": [asdict(finding) for finding in findings]})
        whole: dict[str, Any] = plain({**found, "runs": runs})
        return whole


class TwinTraining:
    """Both models in training: head dimension, number of steps, and the seed of weights and batches."""

    def __init__(self, head_dim: int = HEAD_DIM, steps: int = STEPS, seed: int = 0) -> None:
        self.head_dim, self.step_count, self.seed = head_dim, steps, seed
        self.models = {
            name: seeded_model(TASK.vocabulary, seed, head_dim=head_dim, scale=scale) for name, scale in SCALES.items()
        }
        self.losses: dict[str, list[tuple[int, float]]] = {name: [] for name in SCALES}
        self.records: dict[str, list[Record]] = {name: [] for name in SCALES}
        with one_thread():
            batch = TASK.held_out(SEQUENCES)
            self.received = {name: query_shares(model, batch) for name, model in self.models.items()}

    def steps(self) -> Iterator[dict[str, Step]]:
        """Train both on the same batches, one step of each at a time."""
        schedule = Schedule(self.step_count, RATE, seed=self.seed)
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
    @torch.no_grad()
    def twins(self) -> Twins:
        """Return the result, with its verdict and explanation."""
        batch, runs = TASK.held_out(4).tokens, []
        for name, model in self.models.items():
            received = tuple(zip(SHARES, self.received[name].curve, strict=True))
            losses, records = tuple(self.losses[name]), tuple(self.records[name])
            runs.append(TwinRun(name, losses, records, audit(model, batch), received, held_out_loss(model, TASK)))
        scaled, unscaled = (held_out_loss(model, TASK) for model in self.models.values())
        title = f"Why √d_k: the same model with and without it, d_k = {self.head_dim}"
        reasons = explanation(self.head_dim, self.records, self.received, unscaled)
        return Twins(title, verdict(scaled, unscaled), reasons, tuple(runs), self._settings())

    def _settings(self) -> dict[str, object]:
        return {
            "model": f"{LAYERS} layers, {HEADS} heads of d_k {self.head_dim}, rotary positions; the same first "
            "weights and batches",
            "task": f"recall which of {TASK.values} values goes with a key: {TASK.pairs} pairs in each sequence, shown "
            f"{TASK.rounds} times",
            "training": f"{self.step_count} steps of 16 sequences, Adam at {RATE:g}, seed {self.seed}",
            "scores": f"every row of every head, every {EVERY} steps",
            "gradient": f"on the first layer's queries before the first step, from {SEQUENCES} held-out sequences",
            "loss of guessing any value": TASK.chance,
            "loss of guessing a value of the sequence": math.log(TASK.pairs),
        }


def _next_of(runs: dict[str, Iterator[Step]]) -> dict[str, Step]:
    logger = logging.getLogger("attnscale")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # the alarms of the unscaled model are expected
    try:
        with one_thread():  # restored between steps
            return {name: step for name, run in runs.items() if (step := next(run, None)) is not None}
    finally:
        logger.setLevel(level)


def verdict(scaled: float, unscaled: float) -> str:
    """Compare the held-out losses."""
    if not math.isfinite(unscaled) and math.isfinite(scaled):
        return f"With 1/√d_k the loss is {scaled:.3g}. Without it training broke down."
    if scaled < LEARNED <= unscaled - DIFFERENT:
        return f"With 1/√d_k the model learned the task (loss {scaled:.2g}). Without it, it did not ({unscaled:.2f})."
    if scaled < unscaled - DIFFERENT:
        return f"With 1/√d_k the loss is {scaled:.2f}, without it {unscaled:.2f}."
    if unscaled < scaled - DIFFERENT:
        return f"Here the unscaled model did better: loss {unscaled:.2f}, with 1/√d_k {scaled:.2f}."
    return f"No difference here: loss {scaled:.2f} with 1/√d_k, {unscaled:.2f} without."


def explanation(
    head_dim: int, records: dict[str, list[Record]], received: dict[str, GradientShares], unscaled_loss: float
) -> tuple[str, ...]:
    """Explain the losses by the first scores, the softmax over them and the gradient."""
    with_scale, without = SCALES
    keys = 2 * TASK.pairs * TASK.rounds - 1
    spread, entropy = (
        {name: own[0].whole(number) for name, own in records.items()} for number in ("spread", "entropy_ratio")
    )
    side = "above" if spread[without] > critical_spread(keys) else "below"
    paragraphs = [
        f"Before the first step the unscaled scores have a spread of {spread[without]:.1f}, close to "
        f"√{head_dim}. Divided by √{head_dim} it is {spread[with_scale]:.2f}. The critical spread over "
        f"{keys} keys is √(2 ln {keys}) = {critical_spread(keys):.1f}: the unscaled model starts {side} it. Its mean "
        f"row entropy is {entropy[without]:.0%} of the maximum; the scaled model's is {entropy[with_scale]:.0%}.",
        on_gradient(received[with_scale], received[without]),
    ]
    if abs(unscaled_loss - math.log(TASK.pairs)) < DIFFERENT:
        paragraphs.append(
            f"The unscaled model's loss is about that of guessing among the {TASK.pairs} values of the sequence: it "
            "learned which values occur, but not which value belongs to which key."
        )
    return tuple(paragraphs)


def on_gradient(scaled: GradientShares, unscaled: GradientShares) -> str:
    """Compare how much gradient reaches the queries, and how evenly."""
    times = unscaled.root_mean_square / scaled.root_mean_square
    uneven = unscaled.lower_half < scaled.lower_half and unscaled.top_tenth > scaled.top_tenth
    lead = f"{'larger' if times >= 1 else 'smaller'} without the scale"
    lead += f", {'but' if times >= 1 else 'and'} shared less evenly" if uneven else ", and shared as evenly"
    return (
        f"The gradient that reaches the first layer's queries is {lead}. Its root mean square is {times:.2g} times "
        f"that with the scale. The half of the queries that receives least has {percent(unscaled.lower_half)} of it, "
        f"with the scale {scaled.lower_half:.0%}; the tenth that receives most has {unscaled.top_tenth:.0%}, with the "
        f"scale {scaled.top_tenth:.0%}."
        + (" Adam cancels the size of a gradient, not its unevenness." if uneven else "")
    )
