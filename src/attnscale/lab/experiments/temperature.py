"""What does a temperature other than √d_k do, and does training undo it?"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from attnscale.lab.bands import Band, band
from attnscale.lab.cell import Outcome, Settings
from attnscale.lab.comparing import verdicts
from attnscale.lab.experiment import Conclusion, Experiment
from attnscale.lab.outcomes import Outcomes
from attnscale.lab.result import Check, Heatmap, Plot, Table, column
from attnscale.lab.tasks import TASKS, Task
from attnscale.lab.training import Schedule, score_summary, seeded_model, trained
from attnscale.operator import attention_weights
from attnscale.rules.temperature import temperature
from attnscale.watching import watch

MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of √d_k
PATTERN_SEED, SHOWN = 0, 24  # whose weights are kept, and of how many positions
DIGITS = 4
LATER_LAYERS = 0.02  # these layers see what earlier ones make of the temperature


def grid(quick: bool) -> Sequence[Settings]:
    """Every temperature at every rate, on each task."""
    if quick:
        tasks, rates = {"easy recall": 80}, [0.005]
        size = {"d_model": 32, "heads": 1, "head_dim": 64}
    else:
        tasks, rates = {"characters": 200, "recall": 300}, [0.001, 0.003, 0.01]
        size = {"d_model": 64, "heads": 2, "head_dim": 64}
    return [
        {"task": task, "multiple": multiple, "rate": rate, "steps": steps, **size}
        for task, steps in tasks.items()
        for multiple in MULTIPLES
        for rate in rates
    ]


def run(
    task: str, multiple: float, rate: float, steps: int, d_model: int, heads: int, head_dim: int, seed: int,
    device: str = "cpu",
) -> Outcome:  # fmt: skip
    """The loss of one run, its scores before and after, and for one seed what a head looks at."""
    of, rule = TASKS[task], temperature(multiple * math.sqrt(head_dim))
    model = seeded_model(of.vocabulary, seed, scale=rule, d_model=d_model, heads=heads, head_dim=head_dim).to(device)
    before = score_summary(model, of)
    found = trained(model, of, Schedule(steps, rate, seed))
    after = score_summary(model, of) if math.isfinite(found.end) else dict.fromkeys(before, math.nan)
    return {
        "final": found.final, "diverged": found.diverged,
        "spread_before": before["std"], "spread_after": after["std"],
        "entropy_before": before["entropy_ratio"], "entropy_after": after["entropy_ratio"],
        "pattern": pattern(model, of, rule) if seed == PATTERN_SEED else None,
    }  # fmt: skip


@torch.no_grad()
def pattern(model: nn.Module, task: Task, rule: temperature) -> list[list[float]]:
    """The weights of the first head of the last layer on the first example held out."""
    with watch(model, keep=True) as seen:
        task.held_out(1).to(next(model.parameters()).device).loss(model)
    last = list(seen.layers.values())[-1]
    assert last.query is not None and last.key is not None  # noqa: PT018 (kept)
    weights = attention_weights(last.query, last.key, is_causal=True, scale=rule)[0, 0, :SHOWN, :SHOWN]
    return [[round(value, DIGITS) for value in row] for row in weights.tolist()]


def conclude(outcomes: Outcomes) -> Conclusion:
    """Which temperature is best, what the others cost, and how much of each is left after training."""
    sentences, checks, tables, plots = [], [], [], []
    for task in outcomes.values("task"):
        own = _at_best_rates(outcomes.where(task=task))
        best = min(MULTIPLES, key=lambda multiple: own.band("final", multiple=multiple).mean)
        costs = {multiple: _cost(own, multiple) for multiple in MULTIPLES if multiple != 1}
        slopes = {when: _slope(own, f"spread_{when}") for when in ("before", "after")}
        sentences.append(f"{task.capitalize()}: {_on_costs(costs, best)}; {_on_undoing(own, slopes)}.")
        checks += _checks(task, costs, slopes)
        tables.append(_table(task, own))
        plots += _plots(task, own, slopes)
    diverged = sum(found["diverged"] for _, found in outcomes)
    sentences.append(f"{diverged or 'None'} of {len(outcomes)} runs diverged.")
    return Conclusion(" ".join(sentences), tuple(checks), tuple(tables), tuple(plots))


def _at_best_rates(outcomes: Outcomes) -> Outcomes:
    """The runs of every temperature at the rate at which its mean loss is lowest."""
    rates = outcomes.values("rate")
    cells: list[tuple[Settings, Outcome]] = []
    for multiple in MULTIPLES:
        best = min(rates, key=lambda rate: outcomes.band("final", multiple=multiple, rate=rate).mean)
        cells += outcomes.where(multiple=multiple, rate=best).cells
    return Outcomes(cells)


def _cost(own: Outcomes, multiple: float) -> Band:
    return own.difference("final", {"multiple": multiple}, {"multiple": 1.0}, points=len(MULTIPLES) - 1)


def _slope(own: Outcomes, spread: str) -> Band:
    """d ln(spread) / d ln(τ), seed by seed: −1 where a temperature acts in full, 0 where it is undone."""
    slopes = []
    for seed in own.values("seed"):
        spreads = [own.samples(spread, multiple=multiple, seed=seed)[0] for multiple in MULTIPLES]
        is_known = np.isfinite(spreads).all()
        slopes.append(float(np.polyfit(np.log(MULTIPLES), np.log(spreads), 1)[0]) if is_known else math.nan)
    return band(slopes)


def _on_costs(costs: dict[float, Band], best: float) -> str:
    against = verdicts({_name(multiple): cost for multiple, cost in costs.items()})
    return f"the lowest mean loss is at τ = {_name(best)}; against √d_k, in nats, {against}"


def _on_undoing(own: Outcomes, slopes: dict[str, Band]) -> str:
    ranges = {}
    for when in ("before", "after"):
        means = [own.band(f"entropy_{when}", multiple=multiple).mean for multiple in MULTIPLES]
        ranges[when] = f"{min(means):.2f} to {max(means):.2f}"
    after = slopes["after"]
    share = -after.mean / -slopes["before"].mean
    if not after.half < math.inf:
        verdict = "whether training undoes it cannot be told from one seed"
    elif after.holds(0):
        verdict = "training undoes the temperature"
    elif after.low > slopes["before"].high:
        verdict = f"training undoes {100 * (1 - share):.0f}% of it"
    elif after.high < slopes["before"].low:
        verdict = "training widens what it did"
    else:
        verdict = "training does not undo it"
    return (
        f"entropy ratios over the temperatures are {ranges['before']} before training and {ranges['after']} after, and "
        f"the spread of the scores goes as τ to the power {slopes['before'].mean:.2f} before, {after} after: {verdict}"
    )


def _name(multiple: float) -> str:
    return {0.25: "¼√d_k", 0.5: "½√d_k", 1.0: "√d_k"}.get(multiple, f"{multiple:g}√d_k")


def _checks(task: str, costs: dict[float, Band], slopes: dict[str, Band]) -> list[Check]:
    before, after = slopes["before"], slopes["after"]
    better = [f"{_name(m)} ({cost.mean:+.2g})" for m, cost in costs.items() if cost.high < 0]
    return [
        Check(f"{task}: before training the spread goes as 1/τ", abs(before.mean + 1) < LATER_LAYERS, str(before)),
        Check(f"{task}: no temperature is better than √d_k", not better, ", ".join(better) or "none beyond its band"),
        Check(f"{task}: training undoes part of the temperature", after.low > before.high, f"exponent {after}"),
    ]


def _table(task: str, own: Outcomes) -> Table:
    columns = ("τ", "best rate", "final loss", "±", "more than √d_k", "±", "entropy ratio before", "after",
               "spread before", "after", "diverged")  # fmt: skip
    rows = []
    for multiple in MULTIPLES:
        at = own.where(multiple=multiple)
        final, cost = at.band("final"), _cost(own, multiple)
        states = (at.band(name).mean for name in ("entropy_before", "entropy_after", "spread_before", "spread_after"))
        diverged = sum(found["diverged"] for _, found in at)
        numbers = column([final.mean, final.half, cost.mean, cost.half, *states])
        rows.append((_name(multiple), at.values("rate")[0], *numbers, diverged))
    return Table(f"Temperatures, {task}", columns, tuple(rows))


def _plots(task: str, own: Outcomes, slopes: dict[str, Band]) -> list[Plot | Heatmap]:
    ends = [own.curve(f"{when} training", "multiple", f"entropy_{when}") for when in ("before", "after")]
    spreads = [own.curve(f"{when} training", "multiple", f"spread_{when}") for when in ("before", "after")]
    plots: list[Plot | Heatmap] = [
        Plot(f"Final loss, {task}", "τ/√d_k", "held-out loss, nats",
             (own.curve("at the best rate", "multiple", "final"),),
             f"{_on_costs({m: _cost(own, m) for m in MULTIPLES if m != 1}, _best(own))}.".capitalize(), log_x=True),
        Plot(f"Entropy ratio before and after, {task}", "τ/√d_k", "entropy ratio", tuple(ends),
             "A flatter line after training is a temperature that the weights have made up for.", log_x=True),
        Plot(f"Spread before and after, {task}", "τ/√d_k", "spread of the scores", tuple(spreads),
             f"Slope {slopes['before'].mean:.2f} before, {slopes['after'].mean:.2f} after: −1 is a temperature in "
             "full force, 0 one that is undone.", log_x=True, log_y=True),
    ]  # fmt: skip
    for settings, found in own:
        if settings["seed"] == PATTERN_SEED and found["pattern"] is not None:
            entropy = f"{found['entropy_after']:.2f}"
            notice = f"First head of the last layer, seed {PATTERN_SEED}; the entropy ratio of its model is {entropy}."
            positions = tuple(range(len(found["pattern"])))
            plots.append(
                Heatmap(f"What a trained head looks at, τ = {_name(float(settings['multiple'] or 0))}, {task}", "key",
                        "query", positions, positions, tuple(column(row) for row in found["pattern"]), notice)
            )  # fmt: skip
    return plots


def _best(own: Outcomes) -> float:
    return min(MULTIPLES, key=lambda multiple: own.band("final", multiple=multiple).mean)


EXPERIMENT = Experiment(
    "temperature",
    "What does a temperature other than √d_k do, and does training undo it?",
    grid, run, conclude, seeds=8, quick_seeds=4, trains=True,
core_minutes=17)  # fmt: skip
