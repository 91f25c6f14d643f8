"""Training: one seeded run of a model on a task, step by step."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from attnscale.lab.tasks import Task
from attnscale.models import CausalTransformer
from attnscale.train import Monitor, Record
from attnscale.watching import watch

WARM_UP = 0.1  # share of the steps over which the rate rises; a half cosine to zero follows
LAYERS, HEADS, D_MODEL = 2, 2, 64  # of the lab's model; two layers are what recall needs
HELD_OUT = 64  # examples
CURVE_POINTS = 20
SUMMARISED = ("std", "entropy_ratio", "gradient_gain")
OPTIMISERS: dict[str, Callable[..., Optimizer]] = {
    "adam": lambda parameters, rate: Adam(parameters, rate, betas=(0.9, 0.95), fused=True),
    "sgd": lambda parameters, rate: SGD(parameters, rate, momentum=0.9),
}


@dataclass(frozen=True)
class Schedule:
    """How long, how fast, on how much; `seed` decides the batches."""

    steps: int
    rate: float  # the highest
    seed: int = 0
    batch: int = 16
    optimiser: str = "adam"

    def rate_at(self, step: int) -> float:
        """A linear warm-up, then a half cosine to zero."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.rate * cosine * min(1.0, (step + 1) / (WARM_UP * self.steps))


@dataclass(frozen=True)
class Step:
    """A step that is over; `record` tells the scores it was made with, where a monitor sampled it."""

    number: int
    loss: float  # of its batch, before the step
    record: Record | None = None

    @property
    def is_finite(self) -> bool:
        """Whether training can go on."""
        return math.isfinite(self.loss)


def seeded_model(vocabulary: int, seed: int, **shape: Any) -> CausalTransformer:
    """The lab's model, drawn from a seed; the same weights whatever `scale` is, so that runs can be paired."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return CausalTransformer(vocabulary, **{"d_model": D_MODEL, "layers": LAYERS, "heads": HEADS, **shape})


def training(model: nn.Module, task: Task, schedule: Schedule, monitor: Monitor | None = None) -> Iterator[Step]:
    """Train, one step each time it is asked for the next; it ends early where the loss is not finite.

    Between two steps the model may be looked at or changed, as QK-Clip does with what the monitor saw.

    >>> from attnscale.lab.tasks import Recall
    >>> task = Recall(pairs=2)
    >>> model = seeded_model(task.vocabulary, seed=0, d_model=32)
    >>> steps = list(training(model, task, Schedule(steps=3, rate=0.01), Monitor(model, every=2)))
    >>> [(step.number, step.record is not None) for step in steps]
    [(0, True), (1, False), (2, True)]
    """
    device = next(model.parameters()).device
    optimiser = OPTIMISERS[schedule.optimiser](model.parameters(), schedule.rate)
    generator = torch.Generator().manual_seed(schedule.seed)
    try:
        for number in range(schedule.steps):
            is_sampled = monitor is not None and monitor.is_due
            with monitor or nullcontext():
                for group in optimiser.param_groups:
                    group["lr"] = schedule.rate_at(number)
                loss = task.batch(schedule.batch, generator).to(device).loss(model)
                loss.backward()
                optimiser.step()
                optimiser.zero_grad()
            step = Step(number, loss.item(), monitor.last if monitor is not None and is_sampled else None)
            yield step
            if not step.is_finite:
                return
    finally:
        if monitor is not None:
            monitor.close()


@dataclass(frozen=True)
class Trained:
    """A run that is over. Losses at start and end are of examples that no run trains on."""

    losses: tuple[float, ...]  # of each step's batch
    start: float
    end: float
    records: tuple[Record, ...]

    @property
    def diverged(self) -> bool:
        """Whether it ended no better than it began, or not with a number at all."""
        return not self.end < self.start

    @property
    def final(self) -> float:
        """The loss at the end; where there is none, that of the start, as if nothing had been learned."""
        return self.end if math.isfinite(self.end) else self.start

    def curve(self, steps: int, points: int = CURVE_POINTS) -> list[float]:
        """Mean losses over equal parts of the run; parts that it did not reach count as `final`."""
        parts = _parts(steps, points)
        whole = [*self.losses, *[math.nan] * (steps - len(self.losses))]
        means = (math.fsum(whole[step] for step in part) / len(part) for part in parts)
        return [mean if math.isfinite(mean) else self.final for mean in means]


def curve_steps(steps: int, points: int = CURVE_POINTS) -> list[float]:
    """The steps that a curve's points stand for: the middles of their parts."""
    return [(part.start + part.stop - 1) / 2 for part in _parts(steps, points)]


def _parts(steps: int, points: int) -> list[range]:
    points = min(points, steps)
    return [range(point * steps // points, (point + 1) * steps // points) for point in range(points)]


def trained(
    model: nn.Module,
    task: Task,
    schedule: Schedule,
    monitor: Monitor | None = None,
    between: Callable[[Step], None] = lambda step: None,
) -> Trained:
    """Train to the end; `between` is called after each step."""
    start, losses, records = held_out_loss(model, task), [], []
    with without_alarms():
        for step in training(model, task, schedule, monitor):
            losses.append(step.loss)
            records += [step.record] if step.record is not None else []
            between(step)
    return Trained(tuple(losses), start, held_out_loss(model, task), tuple(records))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, which a monitor leaves out."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def held_out_loss(model: nn.Module, task: Task, size: int = HELD_OUT) -> float:
    """The loss on examples that no run trains on."""
    with evaluating(model):
        return float(task.held_out(size).to(next(model.parameters()).device).loss(model))


def score_summary(model: nn.Module, task: Task, size: int = HELD_OUT) -> dict[str, float]:
    """Spread, entropy ratio and gradient gain of the scores on examples held out, means over heads; the largest."""
    with evaluating(model), watch(model, rows=None) as seen:
        task.held_out(size).to(next(model.parameters()).device).loss(model)
    stats = [layer.stats for layer in seen.layers.values()]
    means = {name: torch.cat([getattr(each, name) for each in stats]).mean().item() for name in SUMMARISED}
    return means | {"max": max(each.max.max().item() for each in stats)}


@contextmanager
def without_alarms() -> Iterator[None]:
    """Log none of what a monitor warns of: here runs that go wrong are the subject."""
    logger = logging.getLogger("attnscale")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
