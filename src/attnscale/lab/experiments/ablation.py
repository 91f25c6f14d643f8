"""Training without 1/√d_k, and with other scales: a small transformer with each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from attnscale.lab.experiment import Check, Conclusion, Experiment, Outcome, Plot, Settings, Table
from attnscale.lab.outcomes import (
    ALIKE,
    UNDECIDED,
    WORSE,
    Band,
    Outcomes,
    banded,
    column,
    diverged_sentence,
    verdict,
    verdicts,
)
from attnscale.lab.tasks import TASKS
from attnscale.lab.training import Schedule, curve_steps, score_summary, seeded_model, trained

REFERENCE, WITHOUT = "1/√d_k", "unscaled"
VARIANTS = {
    REFERENCE: "inverse_sqrt",
    WITHOUT: "unscaled",
    "1/d_k": "inverse_dim",
    "QK-norm": "QKNorm",
    "learned τ": "LearnedTemperature",
    "τ of the query": "QueryTemperature",
}
HEAD_DIMS = (8, 32, 128, 256)


def grid(quick: bool) -> Sequence[Settings]:
    """List every variant at every d_k and rate, on each task."""
    if quick:
        small = {"d_model": 32, "heads": 1, "steps": 40}
        whole = _product("easy recall", [8, 256], [0.005], small)
        return [own for own in whole if own["head_dim"] == 256 or own["variant"] in (REFERENCE, WITHOUT)]
    full = {"d_model": 64, "heads": 2}
    return [
        *_product("characters", HEAD_DIMS, [0.001, 0.003, 0.01, 0.03], full | {"steps": 200}),
        *_product("recall", HEAD_DIMS, [0.0003, 0.001, 0.003, 0.01], full | {"steps": 300}),
    ]


def _product(
    task: str, head_dims: Sequence[int], rates: Sequence[float], size: Mapping[str, int]
) -> list[Settings]:  # fmt: skip
    return [
        {"task": task, "variant": variant, "head_dim": head_dim, "rate": rate, **size}
        for head_dim in sorted(head_dims, reverse=True)  # slow ones first, so that no worker is left with one
        for variant in VARIANTS for rate in rates
    ]  # fmt: skip


def run(
    task: str, variant: str, head_dim: int, rate: float, d_model: int, heads: int, steps: int, seed: int,
    device: str = "cpu",
) -> Outcome:  # fmt: skip
    """Train one model, and measure its scores before."""
    of = TASKS[task]
    shape = {"d_model": d_model, "heads": heads, "head_dim": head_dim}
    model = seeded_model(of.vocabulary, seed, scale=VARIANTS[variant], **shape).to(device)
    before = score_summary(model, of)
    found = trained(model, of, Schedule(steps, rate, seed))
    return {
        "final": found.final, "diverged": found.diverged, "curve": found.curve(steps),
        "entropy_before": before["entropy_ratio"], "gain_before": before["jacobian_trace"],
    }  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A variant at one d_k, at the learning rate that suits it best."""

    task: str
    variant: str
    head_dim: int
    rate: float
    final: Band
    difference: Band  # to the reference, paired by seed
    runs: Outcomes  # at that rate


def conclude(outcomes: Outcomes) -> Conclusion:
    """Say what each variant costs or gains against 1/√d_k, each at its best rate."""
    entries = {task: _entries(outcomes.where(task=task), task) for task in outcomes.values("task")}
    text = " ".join([
        f"Loss without a scale, against {REFERENCE}: {'; '.join(map(_headline, entries.values()))}.",
        f"All variants against {REFERENCE} in nats, each at its best learning rate, by d_k.",
        *(f"{task.capitalize()}: {_sentence(own)}." for task, own in entries.items()),
        diverged_sentence(outcomes),
    ])  # fmt: skip
    checks = [check for own in entries.values() for check in _checks(own)]
    plots = [plot for own in entries.values() for plot in _plots(own)]
    return Conclusion(text, tuple(checks), tuple(map(_table, entries.values())), tuple(plots))


def _entries(own: Outcomes, task: str) -> list[Entry]:
    head_dims, entries = sorted(own.values("head_dim")), []
    for head_dim in head_dims:
        at = own.where(head_dim=head_dim)
        best = {variant: _best_rate(at.where(variant=variant)) for variant in at.values("variant")}
        reference: Settings = {"variant": REFERENCE, "rate": best[REFERENCE]}
        for variant, rate in best.items():
            runs = at.where(variant=variant, rate=rate)
            difference = at.difference("final", {"variant": variant, "rate": rate}, reference, points=len(head_dims))
            entries.append(Entry(task, variant, head_dim, rate, runs.band("final"), difference, runs))
    return entries


def _best_rate(runs: Outcomes) -> float:
    return float(min(runs.values("rate"), key=lambda rate: runs.band("final", rate=rate).mean))


def _without(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.variant == WITHOUT]


def _headline(entries: Sequence[Entry]) -> str:
    ends = _without(entries)[-1], _without(entries)[0]
    return f"{entries[0].task} " + ", ".join(
        f"{verdict(end.difference)} at d_k = {end.head_dim} ({end.difference:+.2g} nats)" for end in ends
    )


def _sentence(entries: Sequence[Entry]) -> str:
    variants = dict.fromkeys(entry.variant for entry in entries if entry.variant != REFERENCE)
    own = {name: {f"{e.head_dim}": e.difference for e in entries if e.variant == name} for name in variants}
    return "; ".join(f"{name} {verdicts(differences)}" for name, differences in own.items())


def _checks(entries: Sequence[Entry]) -> list[Check]:
    task, without = entries[0].task, _without(entries)
    smallest, largest = without[0], without[-1]
    return [
        Check(f"{task}: without a scale the loss is worse at d_k = {largest.head_dim}",
              _is(WORSE, largest.difference), f"{largest.difference:+.2g} nats"),
        Check(f"{task}: a scale makes no difference at d_k = {smallest.head_dim}",
              _is(ALIKE, smallest.difference), f"{smallest.difference:+.2g} nats"),
        Check(f"{task}: the cost of no scale grows with d_k",
              all(fewer.difference.mean < more.difference.mean for fewer, more in pairwise(without)),
              ", ".join(f"{entry.difference.mean:.2g} at {entry.head_dim}" for entry in without)),
    ]  # fmt: skip


def _is(word: str, difference: Band) -> bool | None:
    found = verdict(difference)
    return None if found == UNDECIDED else found == word


def _table(entries: Sequence[Entry]) -> Table:
    columns = ("d_k", "scale", "best rate", "final loss", "±", f"more than {REFERENCE}", "±", "verdict", "diverged",
               "entropy at the start", "1 − Σp² at the start")  # fmt: skip
    rows = []
    for entry in entries:
        numbers = column([entry.final.mean, entry.final.margin, entry.difference.mean, entry.difference.margin])
        starts = (entry.runs.band(name).mean for name in ("entropy_before", "gain_before"))
        word = "" if entry.variant == REFERENCE else verdict(entry.difference)
        rows.append((entry.head_dim, entry.variant, entry.rate, *numbers, word, entry.runs.count("diverged"), *starts))
    return Table(f"Final loss, {entries[0].task}", columns, tuple(rows))


def _plots(entries: Sequence[Entry]) -> list[Plot]:
    task, head_dims = entries[0].task, dict.fromkeys(entry.head_dim for entry in entries)
    best = []
    for variant in dict.fromkeys(entry.variant for entry in entries):
        of = [entry for entry in entries if entry.variant == variant]
        best.append(banded(variant, [entry.head_dim for entry in of], [entry.final for entry in of]))
    plots = [Plot(f"Final loss against d_k, {task}", "d_k", "held-out loss, nats", tuple(best),
                  "Each variant at its best learning rate.", log_x=True)]  # fmt: skip
    for head_dim in head_dims:
        curves = tuple(
            entry.runs.series(entry.variant, curve_steps(entry.runs.values("steps")[0]), "curve")
            for entry in entries if entry.head_dim == head_dim
        )  # fmt: skip
        plots.append(Plot(f"Learning curves at d_k = {head_dim}, {task}", "step", "training loss, nats", curves,
                          "Each variant at its best learning rate."))  # fmt: skip
    return plots


EXPERIMENT = Experiment(
    "ablation", "What does training lose without 1/√d_k, and do other scales gain anything?",
    grid, run, conclude, seeds=6, quick_seeds=3, trains=True, core_minutes=120,
)  # fmt: skip
