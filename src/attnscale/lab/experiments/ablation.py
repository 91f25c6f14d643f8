"""Training without 1/√d_k, and with other scales: a small transformer with each."""

from collections.abc import Sequence
from itertools import pairwise

from attnscale.lab.experiment import Check, Conclusion, Experiment, Outcome, Plot, Settings, Table, product
from attnscale.lab.outcomes import (
    ALIKE,
    UNDECIDED,
    WORSE,
    Band,
    Outcomes,
    banded,
    diverged_sentence,
    verdict,
    verdicts,
)
from attnscale.lab.tasks import TASKS
from attnscale.lab.training import Schedule, curve_steps, seeded_run

REFERENCE, WITHOUT = "1/√d_k", "unscaled"
VARIANTS = {
    REFERENCE: "inverse_sqrt",
    WITHOUT: "unscaled",
    "1/d_k": "inverse_dim",
    "QK-norm": "QKNorm",
    "learned τ": "LearnedTemperature",
    "τ of the query": "QueryTemperature",
}
HEAD_DIMS = (256, 128, 32, 8)  # slow cells first, so that no worker ends with one
NOTICE = "Each variant at its best learning rate."


def grid(quick: bool) -> Sequence[Settings]:
    """List every variant at every d_k and rate, on each task."""
    if quick:
        small = {"rate": 0.005, "d_model": 32, "heads": 1, "steps": 40}
        narrow = product(task="easy recall", head_dim=8, variant=[REFERENCE, WITHOUT], **small)
        return [*product(task="easy recall", head_dim=256, variant=VARIANTS, **small), *narrow]
    rates = {"characters": [0.001, 0.003, 0.01, 0.03], "recall": [0.0003, 0.001, 0.003, 0.01]}
    steps, size = {"characters": 200, "recall": 300}, {"d_model": 64, "heads": 2}
    cells: list[Settings] = []
    for task in rates:
        cells += product(task=task, head_dim=HEAD_DIMS, variant=VARIANTS, rate=rates[task], steps=steps[task], **size)
    return cells


def run(task: str, variant: str, rate: float, steps: int, seed: int, device: str = "cpu", **shape: int) -> Outcome:
    """Measure the scores of a new model, and train it."""
    schedule = Schedule(steps, rate, seed)
    _, before, found = seeded_run(TASKS[task], schedule, device, scale=VARIANTS[variant], **shape)
    return {
        "final": found.final, "diverged": found.diverged, "curve": found.curve(steps),
        "entropy_before": before["entropy_ratio"], "gain_before": before["jacobian_trace"],
    }  # fmt: skip


def conclude(outcomes: Outcomes) -> Conclusion:
    """Compare the loss of each variant with that of 1/√d_k, each at its best rate."""
    tasks = {
        str(task): own.at_best_rates("head_dim", "variant") for (task,), own in outcomes.groups("task").items()
    }  # fmt: skip
    text = " ".join([
        f"Loss without a scale, against {REFERENCE}: {'; '.join(_headline(own, task) for task, own in tasks.items())}.",
        f"All variants against {REFERENCE} in nats, each at its best learning rate, by d_k.",
        *(f"{task.capitalize()}: {_sentence(own)}." for task, own in tasks.items()),
        diverged_sentence(outcomes),
    ])  # fmt: skip
    checks = [check for task, own in tasks.items() for check in _checks(own, task)]
    plots = [plot for task, own in tasks.items() for plot in _plots(own, task)]
    return Conclusion(text, checks, [_table(own, task) for task, own in tasks.items()], plots)


def _costs(own: Outcomes, variant: str) -> dict[int, Band]:
    """Return the loss of a variant minus that of 1/√d_k at each d_k, paired by seed."""
    sides, points = ({"variant": variant}, {"variant": REFERENCE}), len(own.values("head_dim"))
    head_dims = sorted(own.where(variant=variant).values("head_dim"))
    return {head_dim: own.difference("final", *sides, points=points, head_dim=head_dim) for head_dim in head_dims}


def _headline(own: Outcomes, task: str) -> str:
    costs = _costs(own, WITHOUT)
    ends = {head_dim: costs[head_dim] for head_dim in (max(costs), min(costs))}
    return f"{task} " + ", ".join(f"{verdict(cost)} at d_k = {dim} ({cost:+.2g} nats)" for dim, cost in ends.items())


def _sentence(own: Outcomes) -> str:
    others = [variant for variant in own.values("variant") if variant != REFERENCE]
    return "; ".join(f"{variant} {verdicts(_costs(own, variant))}" for variant in others)


def _checks(own: Outcomes, task: str) -> list[Check]:
    costs = _costs(own, WITHOUT)
    smallest, largest = min(costs), max(costs)
    return [
        Check(f"{task}: without a scale the loss is worse at d_k = {largest}",
              _is(WORSE, costs[largest]), f"{costs[largest]:+.2g} nats"),
        Check(f"{task}: a scale makes no difference at d_k = {smallest}",
              _is(ALIKE, costs[smallest]), f"{costs[smallest]:+.2g} nats"),
        Check(f"{task}: the cost of no scale grows with d_k",
              all(fewer.mean < more.mean for fewer, more in pairwise(costs.values())),
              ", ".join(f"{cost.mean:.2g} at {head_dim}" for head_dim, cost in costs.items())),
    ]  # fmt: skip


def _is(word: str, difference: Band) -> bool | None:
    found = verdict(difference)
    return None if found == UNDECIDED else found == word


def _table(own: Outcomes, task: str) -> Table:
    columns = ("d_k", "scale", "best rate", "final loss", "±", f"more than {REFERENCE}", "±", "verdict", "diverged",
               "entropy at the start", "1 − Σp² at the start")  # fmt: skip
    rows = []
    for head_dim in sorted(own.values("head_dim")):
        for (variant,), runs in own.where(head_dim=head_dim).groups("variant").items():
            final, cost = runs.band("final"), _costs(own, str(variant))[head_dim]
            starts = (runs.band(name).mean for name in ("entropy_before", "gain_before"))
            word = "" if variant == REFERENCE else verdict(cost)
            rate = runs.values("rate")[0]
            numbers = (*final.columns, *cost.columns, word, runs.count("diverged"), *starts)
            rows.append((head_dim, variant, rate, *numbers))
    return Table(f"Final loss, {task}", columns, tuple(rows))


def _plots(own: Outcomes, task: str) -> list[Plot]:
    head_dims, best = sorted(own.values("head_dim")), []
    for (variant,), runs in own.groups("variant").items():
        along = sorted(runs.values("head_dim"))
        best.append(banded(str(variant), along, [runs.band("final", head_dim=head_dim) for head_dim in along]))
    plots = [Plot(f"Final loss against d_k, {task}", "d_k", "held-out loss, nats", tuple(best), NOTICE, log_x=True)]
    for head_dim in head_dims:
        at = own.where(head_dim=head_dim)
        steps = curve_steps(at.values("steps")[0])
        curves = tuple(runs.series(str(variant), steps, "curve") for (variant,), runs in at.groups("variant").items())
        plots.append(
            Plot(f"Learning curves at d_k = {head_dim}, {task}", "step", "training loss, nats", curves, NOTICE)
        )
    return plots


EXPERIMENT = Experiment(
    "ablation", "What does training lose without 1/√d_k, and do other scales gain anything?",
    grid, run, conclude, seeds=6, quick_seeds=3, trains=True, core_minutes=120,
)  # fmt: skip
