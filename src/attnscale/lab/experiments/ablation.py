"""What is lost without 1/√d_k, and what other scales gain? A small transformer, trained with each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from attnscale.lab.bands import Band
from attnscale.lab.cell import Outcome, Settings
from attnscale.lab.comparing import ALIKE, WORSE, effect, verdict, verdicts
from attnscale.lab.experiment import Conclusion, Experiment
from attnscale.lab.outcomes import Outcomes, banded
from attnscale.lab.result import Check, Plot, Table, column
from attnscale.lab.tasks import TASKS
from attnscale.lab.training import Schedule, curve_steps, score_summary, seeded_model, trained
from attnscale.rules.apply import Scale

REFERENCE, WITHOUT = "1/√d_k", "unscaled"
VARIANTS: dict[str, Scale] = {
    REFERENCE: "inverse_sqrt",
    WITHOUT: "unscaled",
    "1/d_k": "inverse_dim",
    "QK-norm": "QKNorm",
    "learned τ": "LearnedTemperature",
    "τ of the query": "QueryTemperature",
}
HEAD_DIMS = (8, 32, 128, 256)


def grid(quick: bool) -> Sequence[Settings]:
    """Every variant at every d_k and rate, on each task."""
    if quick:
        small = {"d_model": 32, "heads": 1, "steps": 40}
        whole = _product(["easy recall"], [8, 256], [0.005], small)
        return [own for own in whole if own["head_dim"] == 256 or own["variant"] in (REFERENCE, WITHOUT)]
    full = {"d_model": 64, "heads": 2}
    return [
        *_product(["characters"], HEAD_DIMS, [0.001, 0.003, 0.01, 0.03], full | {"steps": 200}),
        *_product(["recall"], HEAD_DIMS, [0.0003, 0.001, 0.003, 0.01], full | {"steps": 300}),
    ]


def _product(
    tasks: Sequence[str], head_dims: Sequence[int], rates: Sequence[float], size: Mapping[str, int]
) -> list[Settings]:
    return [
        {"task": task, "variant": variant, "head_dim": head_dim, "rate": rate, **size}
        for task in tasks
        for head_dim in sorted(head_dims, reverse=True)  # the slow ones first, so that no worker is left with one
        for variant in VARIANTS
        for rate in rates
    ]


def run(
    task: str, variant: str, head_dim: int, rate: float, d_model: int, heads: int, steps: int, seed: int,
    device: str = "cpu",
) -> Outcome:  # fmt: skip
    """The loss of one run, and its scores before and after."""
    of = TASKS[task]
    shape = {"d_model": d_model, "heads": heads, "head_dim": head_dim}
    model = seeded_model(of.vocabulary, seed, scale=VARIANTS[variant], **shape).to(device)
    before = score_summary(model, of)
    found = trained(model, of, Schedule(steps, rate, seed))
    after = {} if found.diverged else score_summary(model, of)
    return {
        "final": found.final, "diverged": found.diverged, "curve": found.curve(steps),
        "entropy_before": before["entropy_ratio"], "gain_before": before["gradient_gain"],
        "entropy_after": after.get("entropy_ratio"),
    }  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A variant at one d_k, each at the rate that suits it best."""

    task: str
    variant: str
    head_dim: int
    rate: float
    final: Band
    difference: Band  # to the reference, seed by seed
    runs: Outcomes  # at that rate
    is_edge: bool  # the best rate is the lowest or highest tried

    @property
    def verdict(self) -> str:
        """Worse, better, no difference or undecided."""
        return verdict(self.difference)

    @property
    def effect(self) -> str:
        """How much more it loses, in nats."""
        return effect(self.difference)


def conclude(outcomes: Outcomes) -> Conclusion:
    """What each variant costs or gains against 1/√d_k, at the best rate of each."""
    tasks = outcomes.values("task")
    entries = {task: _entries(outcomes, task) for task in tasks}
    diverged = sum(found["diverged"] for _, found in outcomes)
    text = f"{_headline(entries)} All against {REFERENCE} in nats, each at its best rate, by d_k: " + " ".join(
        f"{task.capitalize()}: {_sentence(entries[task])}." for task in tasks
    )
    text += _on_edges([entry for task in tasks for entry in entries[task]])
    text += f" {diverged or 'None'} of {len(outcomes)} runs diverged" + (
        "; one without a finite loss counts at the loss it began with." if diverged else "."
    )
    checks = [check for task in tasks for check in _checks(entries[task])]
    tables = tuple(_table(entries[task]) for task in tasks)
    plots = [plot for task in tasks for plot in _plots(outcomes, entries[task])]
    return Conclusion(text, tuple(checks), tables, tuple(plots))


def _entries(outcomes: Outcomes, task: str) -> list[Entry]:
    own = outcomes.where(task=task)
    head_dims = sorted(own.values("head_dim"))
    rates, entries = sorted(own.values("rate")), []
    for head_dim in head_dims:
        at = own.where(head_dim=head_dim)
        best = {variant: _best_rate(at.where(variant=variant)) for variant in at.values("variant")}
        reference: Settings = {"variant": REFERENCE, "rate": best[REFERENCE]}
        for variant, rate in best.items():
            runs = at.where(variant=variant, rate=rate)
            difference = at.difference("final", {"variant": variant, "rate": rate}, reference, points=len(head_dims))
            is_edge = len(rates) > 1 and rate in (rates[0], rates[-1])
            entries.append(Entry(task, variant, head_dim, rate, runs.band("final"), difference, runs, is_edge))
    return entries


def _best_rate(runs: Outcomes) -> float:
    return float(min(runs.values("rate"), key=lambda rate: runs.band("final", rate=rate).mean))


def _headline(entries: Mapping[str, Sequence[Entry]]) -> str:
    """What is lost without scaling at the largest d_k and at the smallest."""
    told = []
    for task, own in entries.items():
        without = [entry for entry in own if entry.variant == WITHOUT]
        ends = (f"{end.verdict} at d_k = {end.head_dim} ({end.effect} nats)" for end in (without[-1], without[0]))
        told.append(f"{task} {', '.join(ends)}")
    return f"Training without scaling, against {REFERENCE}: {'; '.join(told)}."


def _sentence(entries: Sequence[Entry]) -> str:
    """Variant by variant: at which d_k it is worse, better or no different."""
    variants = dict.fromkeys(entry.variant for entry in entries if entry.variant != REFERENCE)
    own = {name: {f"{e.head_dim}": e.difference for e in entries if e.variant == name} for name in variants}
    return "; ".join(f"{name} {verdicts(differences)}" for name, differences in own.items())


def _on_edges(entries: Sequence[Entry]) -> str:
    edges = sum(entry.is_edge for entry in entries)
    return f" In {edges} of {len(entries)} cases the best rate is the lowest or highest tried." if edges else ""


def _checks(entries: Sequence[Entry]) -> list[Check]:
    task = entries[0].task
    without = [entry for entry in entries if entry.variant == WITHOUT]
    smallest, largest = without[0], without[-1]
    return [
        Check(
            f"{task}: without scaling, training is worse at d_k = {largest.head_dim}",
            largest.verdict == WORSE,
            f"{largest.effect} nats",
        ),
        Check(
            f"{task}: scaling makes no difference at d_k = {smallest.head_dim}",
            smallest.verdict == ALIKE,
            f"{smallest.effect} nats",
        ),
        Check(
            f"{task}: what is lost without scaling grows with d_k",
            all(fewer.difference.mean < more.difference.mean for fewer, more in pairwise(without)),
            ", ".join(f"{entry.difference.mean:.2g} at {entry.head_dim}" for entry in without),
        ),
    ]


def _table(entries: Sequence[Entry]) -> Table:
    columns = (
        "d_k", "scale", "best rate", "final loss", "±", f"more than {REFERENCE}", "±", "verdict", "diverged",
        "entropy ratio at the start", "gradient gain at the start",
    )  # fmt: skip
    rows = []
    for entry in entries:
        difference = column([entry.difference.mean, entry.difference.half])
        starts = (entry.runs.band(name).mean for name in ("entropy_before", "gain_before"))
        verdict = "" if entry.variant == REFERENCE else entry.verdict
        diverged = sum(found["diverged"] for _, found in entry.runs)
        final = column([entry.final.mean, entry.final.half])
        rows.append((entry.head_dim, entry.variant, entry.rate, *final, *difference, verdict, diverged, *starts))
    return Table(f"Final loss, {entries[0].task}", columns, tuple(rows))


def _plots(outcomes: Outcomes, entries: Sequence[Entry]) -> list[Plot]:
    task = entries[0].task
    head_dims, variants = (list(dict.fromkeys(getattr(e, name) for e in entries)) for name in ("head_dim", "variant"))
    worst = max(entries, key=lambda entry: entry.difference.mean)
    by_variant = {variant: [entry for entry in entries if entry.variant == variant] for variant in variants}
    best = [
        banded(variant, [entry.head_dim for entry in own], [entry.final for entry in own])
        for variant, own in by_variant.items()
    ]
    plots: list[Plot] = [
        Plot(f"Final loss against d_k, {task}", "d_k", "held-out loss, nats", tuple(best),
             f"The largest loss against {REFERENCE} is {worst.effect} nats: {worst.variant} at d_k = {worst.head_dim}.",
             log_x=True)
    ]  # fmt: skip
    for head_dim in head_dims:
        own = [entry for entry in entries if entry.head_dim == head_dim]
        without = next(entry for entry in own if entry.variant == WITHOUT)
        curves = tuple(
            entry.runs.series(entry.variant, curve_steps(entry.runs.values("steps")[0]), "curve") for entry in own
        )
        plots.append(
            Plot(f"Learning curves at d_k = {head_dim}, {task}", "step", "training loss, nats", curves,
                 f"Each at its best rate. {WITHOUT.capitalize()} ends at {without.final} nats, "
                 f"{REFERENCE} at {own[0].final}: {without.verdict}.")
        )  # fmt: skip
    rates = outcomes.where(task=task).values("rate")
    if len(rates) > 1:
        at = outcomes.where(task=task, head_dim=head_dims[-1])
        curves = tuple(at.curve(variant, "rate", "final", variant=variant) for variant in variants)
        plots.append(
            Plot(f"Final loss against rate at d_k = {head_dims[-1]}, {task}", "learning rate", "held-out loss, nats",
                 curves, "A variant that is good at one rate alone is harder to use.", log_x=True)
        )  # fmt: skip
    return plots


EXPERIMENT = Experiment(
    "ablation",
    "What is lost without 1/√d_k, and what do other scales gain?",
    grid, run, conclude, seeds=6, quick_seeds=3, trains=True,
core_minutes=120)  # fmt: skip
