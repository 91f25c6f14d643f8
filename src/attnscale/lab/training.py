"""Training in the lab: seeded models and runs, their losses and scores, and how evenly queries receive gradient."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Adam

from attnscale.lab.tasks import Batch, Task
from attnscale.models import CausalTransformer
from attnscale.models.transformer import CausalSelfAttention
from attnscale.reference import Array
from attnscale.rules import get_rule
from attnscale.train import Monitor, Record
from attnscale.watching import watch

WARM_UP = 0.1  # share of the steps over which the rate rises; half a cosine to zero follows
LAYERS, HEADS, D_MODEL = 2, 2, 64  # of the lab's model; recall needs two layers
HELD_OUT = 64  # examples
CURVE_POINTS = 20
SHARES = tuple(point / 20 for point in range(21))  # shares of queries at the points of a curve
SUMMARISED = ("std", "entropy_ratio", "jacobian_trace")
SCALES = {"none": "unscaled", "1/√d_k": "inverse_sqrt", "1/d_k": "inverse_dim"}  # compared by experiments
NAMES = {"none": "without a scale", "1/√d_k": "with 1/√d_k", "1/d_k": "with 1/d_k"}


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread and flush denormal numbers to zero, and restore both settings afterwards.

    Operations of such small models take microseconds; several threads would wait for each other, on busy cores for
    whole time slices. Saturated rows have denormal gradients, which are ten times slower.
    """
    half_of_the_smallest_normal = torch.tensor(torch.finfo(torch.float32).tiny) / 2
    threads, was_flushing = torch.get_num_threads(), not half_of_the_smallest_normal.item()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_flushing)
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Schedule:
    """Number of steps, learning rate and batch size; `seed` decides the batches."""

    steps: int
    rate: float  # highest learning rate
    seed: int = 0
    batch: int = 16

    def rate_at(self, step: int) -> float:
        """Return the rate of a step: a linear warm-up, then half a cosine to zero."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.rate * cosine * min(1.0, (step + 1) / (WARM_UP * self.steps))


@dataclass(frozen=True)
class Step:
    """A finished step, with the record of its scores if a monitor sampled it."""

    number: int
    loss: float  # of its batch, before the step
    record: Record | None = None


def seeded_model(vocabulary: int, seed: int, **shape: Any) -> CausalTransformer:
    """Draw the lab's model from a seed: the same weights for every `scale`, so that runs can be paired."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return CausalTransformer(vocabulary, **{"d_model": D_MODEL, "layers": LAYERS, "heads": HEADS, **shape})


def attentions_of(model: nn.Module) -> list[CausalSelfAttention]:
    """List the attention modules of a lab's model, first layer first."""
    return [module for module in model.modules() if isinstance(module, CausalSelfAttention)]


def swap_scale(model: nn.Module, scale: str) -> None:
    """Give every attention of the model another scale, one of SCALES; its weights stay."""
    for attention in attentions_of(model):
        attention.scale = get_rule(SCALES[scale])


def adam(model: nn.Module, rate: float) -> Adam:
    """Return the optimiser of the lab."""
    return Adam(model.parameters(), rate, betas=(0.9, 0.95), fused=True)


def training(model: nn.Module, task: Task, schedule: Schedule, monitor: Monitor | None = None) -> Iterator[Step]:
    """Train with Adam, one step per iteration; end early if the loss is not finite.

    >>> from attnscale.lab.tasks import Recall
    >>> task = Recall(pairs=2)
    >>> model = seeded_model(task.vocabulary, seed=0, d_model=32)
    >>> steps = list(training(model, task, Schedule(steps=3, rate=0.01), Monitor(model, every=2)))
    >>> [(step.number, step.record is not None) for step in steps]
    [(0, True), (1, False), (2, True)]
    """
    optimiser = adam(model, schedule.rate)
    generator = torch.Generator().manual_seed(schedule.seed)
    try:
        for number in range(schedule.steps):
            is_sampled = monitor is not None and monitor.is_due
            with monitor or nullcontext():
                for group in optimiser.param_groups:
                    group["lr"] = schedule.rate_at(number)
                loss = task.batch(schedule.batch, generator).loss(model)
                loss.backward()
                optimiser.step()
                optimiser.zero_grad()
            step = Step(number, loss.item(), monitor.last if monitor is not None and is_sampled else None)
            yield step
            if not math.isfinite(step.loss):
                return
    finally:
        if monitor is not None:
            monitor.close()


@dataclass(frozen=True)
class Trained:
    """A finished run. Its losses at the start and the end are on examples that no run trains on."""

    losses: tuple[float, ...]  # of each step's batch
    start: float
    end: float

    @property
    def diverged(self) -> bool:
        """True if the loss at the end is not below that at the start, or is not a number."""
        return not self.end < self.start

    @property
    def final(self) -> float:
        """Loss at the end; if it is not finite, the loss at the start."""
        return self.end if math.isfinite(self.end) else self.start

    def curve(self, steps: int, points: int = CURVE_POINTS) -> list[float]:
        """Return mean losses over equal parts of the run; parts that it did not reach count as `final`."""
        whole = [*self.losses, *[math.nan] * (steps - len(self.losses))]
        means = (math.fsum(part) / len(part) for part in _parts(whole, points))
        return [mean if math.isfinite(mean) else self.final for mean in means]


def curve_steps(steps: int, points: int = CURVE_POINTS) -> list[float]:
    """Return the middle step of each part of a curve."""
    return [float(part.mean()) for part in _parts(range(steps), points)]


def _parts(values: Sequence[float], points: int) -> list[Array]:
    return np.array_split(np.array(values, dtype=np.float64), min(points, len(values)))


def trained(model: nn.Module, task: Task, schedule: Schedule) -> Trained:
    """Train to the end."""
    start = held_out_loss(model, task)
    losses = tuple(step.loss for step in training(model, task, schedule))
    return Trained(losses, start, held_out_loss(model, task))


def seeded_run(
    task: Task, schedule: Schedule, device: str, **shape: Any
) -> tuple[CausalTransformer, dict[str, float], Trained]:
    """Train a model from a seed; return it with a summary of its scores before the first step, and its losses."""
    model = seeded_model(task.vocabulary, schedule.seed, **shape).to(device)
    return model, score_summary(model, task), trained(model, task, schedule)


@torch.no_grad()
def held_out_loss(model: nn.Module, task: Task) -> float:
    """Return the loss on examples that no run trains on."""
    return float(task.held_out(HELD_OUT).loss(model))


@torch.no_grad()
def score_summary(model: nn.Module, task: Task, size: int = HELD_OUT) -> dict[str, float]:
    """Return spread, entropy ratio and 1 − Σp² on held-out examples as means over heads, and the largest score."""
    with watch(model, rows=None) as seen:
        task.held_out(size).loss(model)
    stats = [layer.stats for layer in seen.layers.values()]
    means = {name: torch.cat([getattr(each, name) for each in stats]).mean().item() for name in SUMMARISED}
    return means | {"max": max(each.max.max().item() for each in stats)}


@dataclass(frozen=True)
class GradientShares:
    """Size of the gradient that queries receive, and how evenly it is shared among them.

    Shares refer to the sum of the squared norms, which is the squared norm of the whole gradient.
    """

    root_mean_square: float
    curve: tuple[float, ...]  # share of the gradient that each of SHARES of the queries receives, lowest first

    @property
    def lower_half(self) -> float:
        """Share of the half that receives least: 0.5 if all receive the same."""
        return self.curve[SHARES.index(0.5)]

    @property
    def top_tenth(self) -> float:
        """Share of the tenth that receives most: 0.1 if all receive the same."""
        return 1 - self.curve[SHARES.index(0.9)]


def gradient_shares(sizes: Tensor) -> GradientShares:
    """Summarise the norms of the gradients of many queries.

    >>> gradient_shares(torch.ones(40)).lower_half, gradient_shares(torch.tensor([0.0] * 39 + [1.0])).top_tenth
    (0.5, 1.0)
    """
    squares = sizes.detach().double().flatten().square()
    summed = torch.cat([squares.new_zeros(1), squares.sort().values.cumsum(0)])
    at = len(squares) * torch.tensor(SHARES, dtype=torch.float64)
    below, above = at.floor().long(), at.ceil().long()
    curve = torch.lerp(summed[below], summed[above], at - below) / summed[-1].clamp(min=torch.finfo(torch.float64).tiny)
    return GradientShares(squares.mean().sqrt().item(), tuple(curve.tolist()))


def query_shares(model: nn.Module, batch: Batch) -> GradientShares:
    """Measure the gradient of the loss on a batch with respect to each query of the first layer."""
    attention, queries = attentions_of(model)[0], list[Tensor]()
    hook = attention.query.register_forward_hook(lambda module, args, output: queries.append(output))
    try:
        loss = batch.loss(model)
    finally:
        hook.remove()
    [gradient] = torch.autograd.grad(loss, queries)
    return gradient_shares(gradient.unflatten(-1, (attention.heads, attention.head_dim)).norm(dim=-1))
