"""A trained model under another scale: at once, after more training, and compared with a model trained with it."""

from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache

import torch

from attnscale.lab.experiment import Check, Conclusion, Experiment, Outcome, Plot, Settings, Table, product
from attnscale.lab.outcomes import Outcomes, column, tally
from attnscale.lab.tasks import TASKS, Batch, Characters
from attnscale.lab.training import NAMES, SCALES, Schedule, held_out_loss, seeded_run, swap_scale, trained
from attnscale.models import load_bundled
from attnscale.models.transformer import CausalTransformer

BUNDLED, OWN = "bundled model", "trained here"
KEPT = "1/√d_k"  # scale that all models were trained with
OTHERS = tuple(scale for scale in SCALES if scale != KEPT)
MOMENTS = AT_ONCE, LATER, FRESH = "at once", "after more training", "from the start"
PARTS, WINDOWS = 8, 4  # parts of the held-out text, one for each seed; windows in a part
MORE = 3  # a third of the steps, at a third of the rate
SLIGHT = 0.5  # a cost below this share of the cost for an untrained model is slight


def grid(quick: bool) -> Sequence[Settings]:
    """List the bundled model, and models of every d_k that are trained first."""
    task, steps, head_dims = ("easy recall", 80, [16, 256]) if quick else ("recall", 300, [16, 64, 256])
    return [{"part": BUNDLED}, *product(part=OWN, task=task, steps=steps, head_dim=head_dims)]


def run(part: str, seed: int, task: str = "recall", steps: int = 1, head_dim: int = 2, device: str = "cpu") -> Outcome:
    """Measure losses in nats under every scale, at each of MOMENTS."""
    if part == BUNDLED:
        return {f"{scale} {AT_ONCE}": bundled_loss(scale, seed) for scale in SCALES}
    of = TASKS[task]
    rate, shape = (0.005, {"d_model": 32, "heads": 1}) if task == "easy recall" else (0.003, {})
    schedule, more = Schedule(steps, rate, seed), Schedule(steps // MORE, rate / MORE, seed + 1)
    learned, _, kept = seeded_run(of, schedule, device, scale=SCALES[KEPT], head_dim=head_dim, **shape)
    found = {f"{KEPT} {FRESH}": kept.end}
    for scale in SCALES:
        model = deepcopy(learned)
        swap_scale(model, scale)
        found[f"{scale} {AT_ONCE}"] = held_out_loss(model, of)
        found[f"{scale} {LATER}"] = trained(model, of, more).final
        if scale != KEPT:
            fresh = seeded_run(of, schedule, device, scale=SCALES[scale], head_dim=head_dim, **shape)[2]
            found[f"{scale} {FRESH}"] = fresh.final
    return found


@torch.no_grad()
def bundled_loss(scale: str, part: int = 0) -> float:
    """Return the loss of the model that ships with the package, under another scale, on a part of the held-out text."""
    model = deepcopy(_bundled())
    swap_scale(model, scale)
    windows = Characters(model.context).held_out(PARTS * WINDOWS)
    own = slice(part % PARTS, None, PARTS)  # windows of a part are spread over the text
    return float(Batch(windows.tokens[own], windows.targets[own]).loss(model))


@lru_cache(maxsize=1)
def _bundled() -> CausalTransformer:
    return load_bundled()[0]


def conclude(outcomes: Outcomes) -> Conclusion:
    """Compare the cost of another scale for a trained model with that for a model that learns with it."""
    shipped, own = (outcomes.where(part=part).derived(_costs) for part in (BUNDLED, OWN))
    head_dims = own.values("head_dim")
    costs = {scale: shipped.band(f"cost of {scale} {AT_ONCE}") for scale in OTHERS}
    checks = [
        Check("the bundled model does best with the scale it was trained with",
              all(cost.low > 0 for cost in costs.values()),
              "; ".join(f"{NAMES[scale]} {cost:+.2g}" for scale, cost in costs.items())),
        *(_check(own.where(head_dim=head_dim), head_dim) for head_dim in head_dims),
    ]  # fmt: skip
    losses = {scale: f"{shipped.band(f'{scale} {AT_ONCE}'):.2f}" for scale in SCALES}
    text = " ".join([
        f"The bundled model, trained with {KEPT}, has a held-out loss of {losses[KEPT]} nats; "
        + ", ".join(f"{NAMES[scale]} {losses[scale]}" for scale in OTHERS) + ".",
        *(_sentence(own.where(head_dim=head_dim), head_dim) for head_dim in head_dims),
        tally(checks),
    ])  # fmt: skip
    return Conclusion(text, checks, _tables(shipped, own), _plots(own))


def _costs(found: Outcome) -> Outcome:
    """Return the loss of each scale minus that of KEPT, and the cost of no scale minus the largest slight cost."""
    costs = {
        f"cost of {name}": loss - found[f"{KEPT} {name.partition(' ')[2]}"] for name, loss in found.items()
    }  # fmt: skip
    if f"none {FRESH}" not in found:
        return costs
    return costs | {"excess": costs[f"cost of none {AT_ONCE}"] - SLIGHT * costs[f"cost of none {FRESH}"]}


def _check(own: Outcomes, head_dim: int) -> Check:
    once, fresh = (own.band(f"cost of none {when}") for when in (AT_ONCE, FRESH))
    statement = "removing the scale costs a trained model less than half of what it costs an untrained one"
    holds = own.band("excess").is_below(0.0)
    return Check(f"d_k = {head_dim}: {statement}", holds, f"{once:+.2g} against {fresh:+.2g} nats")


def _sentence(own: Outcomes, head_dim: int) -> str:
    parts = (
        f"{NAMES[scale]} " + ", ".join(f"{own.band(f'cost of {scale} {when}'):+.2g} {when}" for when in MOMENTS)
        for scale in OTHERS
    )
    return f"Cost in nats at d_k = {head_dim}: {'; '.join(parts)}."


def _tables(shipped: Outcomes, own: Outcomes) -> list[Table]:
    first, rows = [], []
    for scale in SCALES:
        first.append((NAMES[scale], *shipped.band(f"{scale} {AT_ONCE}").columns))
    for (head_dim,), runs in own.groups("head_dim").items():
        for scale in SCALES:
            rows.append((head_dim, NAMES[scale], *column([runs.band(f"{scale} {when}").mean for when in MOMENTS])))
    return [
        Table("The bundled model, held-out loss in nats", ("scale", "loss", "±"), tuple(first)),
        Table(f"Trained with {KEPT}, then changed; held-out loss in nats", ("d_k", "scale", *MOMENTS), tuple(rows)),
    ]


def _plots(own: Outcomes) -> list[Plot]:
    notices = {
        AT_ONCE: f"All were trained with {KEPT}; only the scale was changed.",
        LATER: "A third of the steps, with the new scale.",
        FRESH: "Cost of the same scale to an untrained model.",
    }
    plots = []
    for when, notice in notices.items():
        curves = tuple(own.curve(NAMES[scale], "head_dim", f"{scale} {when}") for scale in SCALES)
        title = f"Loss with another scale {when}"
        plots.append(Plot(title, "d_k", "held-out loss, nats", curves, notice, log_x=True))
    return plots


EXPERIMENT = Experiment("trained", "Does a trained model still need the scale it was trained with?", grid, run,
                        conclude, seeds=4, quick_seeds=3, trains=True, version=2, core_minutes=16)  # fmt: skip
