"""What is lost without 1/√d_k, and what other scales gain? A small transformer, trained with each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from attnscale.lab.bands import Band
from attnscale.lab.cell import Outcome, Settings
from attnscale.lab.experiment import Conclusion, Experiment
from attnscale.lab.outcomes import Outcomes, banded
from attnscale.lab.result import Check, Plot, Table, column
from attnscale.lab.tasks import TASKS
from attnscale.lab.training import Schedule, curve_steps, score_summary, seeded_model, trained
from attnscale.rules.apply import Scale
from attnscale.rules.inverse_dim import inverse_dim

REFERENCE, WITHOUT = "1/√d_k", "unscaled"
VARIANTS: dict[str, Scale] = {
    REFERENCE: "inverse_sqrt",
    WITHOUT: "unscaled",
    "1/d_k": inverse_dim(base=1),
    "QK-norm": "QKNorm",
    "learned τ": "LearnedTemperature",
    "τ of the query": "QueryTemperature",
}


def grid(quick: bool) -> Sequence[Settings]:
    """Every variant at every d_k and rate, on each task."""
    if quick:
        small = {"d_model": 32, "heads": 1, "steps": 40}
        return _product(["easy recall"], [8, 256], [0.005], small)
    full = {"d_model": 64, "heads": 2}
    rates = [0.001, 0.003, 0.01]
    return [
        *_product(["characters"], [8, 32, 128, 256], rates, full | {"steps": 200}),
        *_product(["recall"], [8, 32, 128, 256], rates, full | {"steps": 300}),
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

    @property
    def verdict(self) -> str:
        """Worse, better, or neither by more than the band."""
        if self.difference.seeds < 2:
            return "not to be told from one seed"
        return "worse" if self.difference.low > 0 else "better" if self.difference.high < 0 else "no difference"

    @property
    def effect(self) -> str:
        """How much more it loses, in nats."""
        return f"{self.difference.mean:+.2g} ± {self.difference.half:.2g}"


def conclude(outcomes: Outcomes) -> Conclusion:
    """What each variant costs or gains against 1/√d_k, at the best rate of each."""
    tasks = outcomes.values("task")
    entries = {task: _entries(outcomes, task) for task in tasks}
    diverged = sum(found["diverged"] for _, found in outcomes)
    text = " ".join(
        f"{task.capitalize()}, loss against {REFERENCE} in nats, each at its best rate: {_sentence(entries[task])}."
        for task in tasks
    )
    text += " " + (
        f"{diverged} of {len(outcomes)} runs diverged: they count as having learned nothing."
        if diverged
        else f"None of {len(outcomes)} runs diverged."
    )
    checks = [check for task in tasks for check in _checks(entries[task])]
    tables = tuple(_table(entries[task]) for task in tasks)
    plots = [plot for task in tasks for plot in _plots(outcomes, entries[task])]
    return Conclusion(text, tuple(checks), tables, tuple(plots))


def _entries(outcomes: Outcomes, task: str) -> list[Entry]:
    own = outcomes.where(task=task)
    head_dims, variants = sorted(own.values("head_dim")), own.values("variant")
    entries = []
    for head_dim in head_dims:
        at = own.where(head_dim=head_dim)
        best = {variant: _best_rate(at.where(variant=variant)) for variant in variants}
        reference: Settings = {"variant": REFERENCE, "rate": best[REFERENCE]}
        for variant in variants:
            runs = at.where(variant=variant, rate=best[variant])
            difference = at.difference(
                "final", {"variant": variant, "rate": best[variant]}, reference, points=len(head_dims)
            )
            entries.append(Entry(task, variant, head_dim, best[variant], runs.band("final"), difference, runs))
    return entries


def _best_rate(runs: Outcomes) -> float:
    return float(min(runs.values("rate"), key=lambda rate: runs.band("final", rate=rate).mean))


def _sentence(entries: Sequence[Entry]) -> str:
    """Variant by variant: where it is worse, where better, and where there is no difference."""
    parts = []
    for variant in dict.fromkeys(entry.variant for entry in entries if entry.variant != REFERENCE):
        own = [entry for entry in entries if entry.variant == variant]
        verdicts = dict.fromkeys(entry.verdict for entry in own)
        groups = ([entry for entry in own if entry.verdict == verdict] for verdict in verdicts)
        parts.append(f"{variant} " + ", ".join(map(_group, groups)))
    return "; ".join(parts)


def _group(entries: Sequence[Entry]) -> str:
    """Entries of one verdict: "worse at d_k = 128 (+0.1 ± 0.02), 256 (+0.2 ± 0.03)"."""
    verdict = entries[0].verdict
    if verdict == "no difference":
        most = max(max(abs(entry.difference.low), abs(entry.difference.high)) for entry in entries)
        return f"no difference at d_k = {', '.join(str(entry.head_dim) for entry in entries)} (beyond {most:.2g})"
    return f"{verdict} at d_k = " + ", ".join(f"{entry.head_dim} ({entry.effect})" for entry in entries)


def _checks(entries: Sequence[Entry]) -> list[Check]:
    task = entries[0].task
    without = [entry for entry in entries if entry.variant == WITHOUT]
    smallest, largest = without[0], without[-1]
    return [
        Check(
            f"{task}: without scaling, training is worse at d_k = {largest.head_dim}",
            largest.verdict == "worse",
            f"{largest.effect} nats",
        ),
        Check(
            f"{task}: scaling makes no difference at d_k = {smallest.head_dim}",
            smallest.verdict == "no difference",
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
    best = [
        banded(variant, head_dims, [entry.final for entry in entries if entry.variant == variant])
        for variant in variants
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
)  # fmt: skip
