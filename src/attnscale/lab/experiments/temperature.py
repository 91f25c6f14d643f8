"""Temperatures other than √d_k: their cost, and how much of each remains after training."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from attnscale.lab.experiment import (
    Check,
    Conclusion,
    Curve,
    Experiment,
    Heatmap,
    Outcome,
    Plot,
    Settings,
    Table,
    product,
)
from attnscale.lab.outcomes import Band, Outcomes, column, diverged_sentence, verdicts
from attnscale.lab.tasks import TASKS, Task
from attnscale.lab.training import Schedule, score_summary, seeded_run
from attnscale.operator import attention_weights
from attnscale.rules.temperature import temperature
from attnscale.watching import watch

MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)  # multiples of √d_k
PATTERN_SEED, SHOWN = 0, 24  # seed of the stored weights, and their number of positions
DIGITS = 4
LATER_LAYERS = 0.02  # later layers see the effect of a temperature on earlier ones


def grid(quick: bool) -> Sequence[Settings]:
    """List every temperature at every rate, on each task."""
    if quick:
        small = {"d_model": 32, "heads": 1, "head_dim": 64}
        return product(task="easy recall", multiple=MULTIPLES, rate=0.005, steps=80, **small)
    rates, size = [0.001, 0.003, 0.01], {"d_model": 64, "heads": 2, "head_dim": 64}
    return [
        *product(task="characters", multiple=MULTIPLES, rate=rates, steps=200, **size),
        *product(task="recall", multiple=MULTIPLES, rate=rates, steps=300, **size),
    ]


def run(
    task: str, multiple: float, rate: float, steps: int, head_dim: int, seed: int, device: str = "cpu", **shape: int
) -> Outcome:
    """Train a model, measure its scores before and after, and for one seed store the weights of a head."""
    of, rule = TASKS[task], temperature(multiple * math.sqrt(head_dim))
    schedule = Schedule(steps, rate, seed)
    model, before, found = seeded_run(of, schedule, device, scale=rule, head_dim=head_dim, **shape)
    after = score_summary(model, of) if math.isfinite(found.end) else dict.fromkeys(before, math.nan)
    return {
        "final": found.final, "diverged": found.diverged,
        "spread_before": before["std"], "spread_after": after["std"],
        "entropy_before": before["entropy_ratio"], "entropy_after": after["entropy_ratio"],
        "pattern": pattern(model, of, rule) if seed == PATTERN_SEED else None,
    }  # fmt: skip


@torch.no_grad()
def pattern(model: nn.Module, task: Task, rule: temperature) -> list[list[float]]:
    """Return the weights of the first head of the last layer on the first held-out example."""
    with watch(model, keep=True) as seen:
        task.held_out(1).loss(model)
    last = list(seen.layers.values())[-1]
    assert last.query is not None and last.key is not None  # noqa: PT018 (kept)
    weights = attention_weights(last.query, last.key, is_causal=True, scale=rule)[0, 0, :SHOWN, :SHOWN]
    return [[round(value, DIGITS) for value in row] for row in weights.tolist()]


def conclude(outcomes: Outcomes) -> Conclusion:
    """Describe the best temperature, the cost of the others, and how much of each remains after training."""
    sentences, checks, tables, plots = [], [], [], []
    for task in outcomes.values("task"):
        own = outcomes.where(task=task).at_best_rates("multiple")
        costs = {multiple: _cost(own, multiple) for multiple in MULTIPLES if multiple != 1}
        # −1 if a temperature acts in full, 0 if training undid it
        powers = {when: own.exponent(f"spread_{when}", "multiple") for when in ("before", "after")}
        sentences += [f"{task.capitalize()}: {_on_costs(own, costs)}", _on_training(own, powers)]
        checks += _checks(task, costs, powers)
        tables.append(_table(task, own))
        plots += _plots(task, own)
    sentences.append(diverged_sentence(outcomes))
    return Conclusion(" ".join(sentences), checks, tables, plots)


def _cost(own: Outcomes, multiple: float) -> Band:
    return own.difference("final", {"multiple": multiple}, {"multiple": 1.0}, points=len(MULTIPLES) - 1)


def _on_costs(own: Outcomes, costs: dict[float, Band]) -> str:
    best = min(MULTIPLES, key=lambda multiple: own.band("final", multiple=multiple).mean)
    against = verdicts({_name(multiple): cost for multiple, cost in costs.items()})
    return f"the lowest mean loss is at τ = {_name(best)}. Loss against √d_k, in nats: {against}."


def _on_training(own: Outcomes, powers: dict[str, Band]) -> str:
    before, after = powers["before"], powers["after"]
    verdict = {
        True: f"training undoes {100 * (1 - after.mean / before.mean):.0f}% of the temperature",
        False: "training strengthens the temperature",
        None: "undecided whether training undoes part of the temperature",
    }[_is_undone(powers)]
    return f"The spread of the scores follows τ^{before.mean:.2f} before training and τ^({after}) after: {verdict}."


def _is_undone(powers: dict[str, Band]) -> bool | None:
    before, after = powers["before"], powers["after"]
    return True if after.low > before.high else False if after.high < before.low else None


def _name(multiple: float) -> str:
    return {0.25: "¼√d_k", 0.5: "½√d_k", 1.0: "√d_k"}.get(multiple, f"{multiple:g}√d_k")


def _checks(task: str, costs: dict[float, Band], powers: dict[str, Band]) -> list[Check]:
    before, after = powers["before"], powers["after"]
    better = [f"{_name(m)} ({cost.mean:+.2g})" for m, cost in costs.items() if cost.high < 0]
    return [
        Check(f"{task}: before training the spread is proportional to 1/τ", abs(before.mean + 1) < LATER_LAYERS,
              f"exponent {before}"),
        Check(f"{task}: no temperature is better than √d_k", not better, ", ".join(better) or "none significantly"),
        Check(f"{task}: training undoes part of the temperature", _is_undone(powers), f"exponent {after}"),
    ]  # fmt: skip


def _table(task: str, own: Outcomes) -> Table:
    columns = ("τ", "best rate", "final loss", "±", "more than √d_k", "±", "entropy before", "after",
               "spread before", "after", "diverged")  # fmt: skip
    rows = []
    for multiple in MULTIPLES:
        at = own.where(multiple=multiple)
        final, cost = at.band("final"), _cost(own, multiple)
        states = (at.band(name).mean for name in ("entropy_before", "entropy_after", "spread_before", "spread_after"))
        numbers = (*final.columns, *cost.columns, *column(states), at.count("diverged"))
        rows.append((_name(multiple), at.values("rate")[0], *numbers))
    return Table(f"Temperatures, {task}", columns, tuple(rows))


def _plots(task: str, own: Outcomes) -> list[Plot | Heatmap]:
    def ends(measure: str) -> tuple[Curve, ...]:
        return tuple(own.curve(f"{when} training", "multiple", f"{measure}_{when}") for when in ("before", "after"))

    plots: list[Plot | Heatmap] = [
        Plot(f"Final loss, {task}", "τ/√d_k", "held-out loss, nats",
             (own.curve("at the best rate", "multiple", "final"),), "√d_k is at 1.", log_x=True),
        Plot(f"Entropy before and after, {task}", "τ/√d_k", "entropy / ln n", ends("entropy"),
             "Flatter after training: the weights have made up for the temperature.", log_x=True),
        Plot(f"Spread before and after, {task}", "τ/√d_k", "spread of the scores", ends("spread"),
             "Slope −1: the temperature acts in full. Slope 0: training undid it.", log_x=True, log_y=True),
    ]  # fmt: skip
    for settings, found in own.where(seed=PATTERN_SEED):
        name, kept = _name(float(settings["multiple"] or 0)), found["pattern"]
        positions = tuple(map(TASKS[task].name_of, TASKS[task].held_out(1).tokens[0, : len(kept)].tolist()))
        plots.append(
            Heatmap(f"Weights of a trained head, τ = {name}, {task}", "key", "query", positions, positions,
                    tuple(map(column, kept)), f"First head of the last layer, seed {PATTERN_SEED}.")
        )  # fmt: skip
    return plots


EXPERIMENT = Experiment(
    "temperature", "What does a temperature other than √d_k cost, and does training undo it?",
    grid, run, conclude, seeds=8, quick_seeds=4, trains=True, core_minutes=17,
)  # fmt: skip
