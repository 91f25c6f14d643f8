"""A trained model under another scale: at once, after more training, and beside one trained with it."""

from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache

import torch

from attnscale.lab.experiment import Check, Conclusion, Experiment, Outcome, Plot, Settings, Table
from attnscale.lab.outcomes import Band, Outcomes, banded, column, is_below_zero, tally
from attnscale.lab.tasks import TASKS, Batch, Characters
from attnscale.lab.training import SCALES, Schedule, held_out_loss, seeded_model, swap_scale, trained
from attnscale.models import load_bundled
from attnscale.models.transformer import CausalTransformer

BUNDLED, OWN = "bundled model", "trained here"
KEPT = "1/√d_k"  # which all were trained with
OTHERS = tuple(scale for scale in SCALES if scale != KEPT)
NAMES = {"none": "without a scale", KEPT: f"with {KEPT}", "1/d_k": "with 1/d_k"}
MOMENTS = ("at once", "after more training", "from the start")
PARTS, WINDOWS = 8, 4  # of the held-out text: one part for each seed, of so many windows
MORE = 3  # a third of the steps, at a third of the rate
SLIGHT = 0.5  # a cost below this share of what it costs an untrained model is slight


def grid(quick: bool) -> Sequence[Settings]:
    """List the bundled model, and models of every d_k that are trained first."""
    task, steps, head_dims = ("easy recall", 80, [16, 256]) if quick else ("recall", 300, [16, 64, 256])
    own: list[Settings] = [
        {"part": OWN, "task": task, "steps": steps, "head_dim": head_dim} for head_dim in head_dims
    ]  # fmt: skip
    return [{"part": BUNDLED}, *own]


def run(part: str, seed: int, task: str = "recall", steps: int = 1, head_dim: int = 2, device: str = "cpu") -> Outcome:
    """Measure losses in nats under every scale, at each of MOMENTS."""
    if part == BUNDLED:
        return {f"{scale} at once": bundled_loss(scale, seed) for scale in SCALES}
    of, is_easy = TASKS[task], task == "easy recall"
    rate, shape = (0.005, {"d_model": 32, "heads": 1}) if is_easy else (0.003, {})
    schedule, more = Schedule(steps, rate, seed), Schedule(steps // MORE, rate / MORE, seed + 1)

    def fresh(scale: str) -> CausalTransformer:
        return seeded_model(of.vocabulary, seed, head_dim=head_dim, scale=SCALES[scale], **shape).to(device)

    learned, found = fresh(KEPT), {}
    trained(learned, of, schedule)
    for scale in SCALES:
        model = deepcopy(learned)
        swap_scale(model, scale)
        found[f"{scale} at once"] = held_out_loss(model, of)
        found[f"{scale} after more training"] = trained(model, of, more).final
        found[f"{scale} from the start"] = (
            found[f"{scale} at once"] if scale == KEPT else trained(fresh(scale), of, schedule).final
        )
    return found


@torch.no_grad()
def bundled_loss(scale: str, part: int = 0) -> float:
    """Return the loss of the model that ships with the package, under another scale, on a part of the held-out text."""
    model = deepcopy(_bundled())
    swap_scale(model, scale)
    windows = Characters(model.context).held_out(PARTS * WINDOWS)
    own = slice(part % PARTS, None, PARTS)  # each part from all over the text
    return float(Batch(windows.tokens[own], windows.targets[own]).loss(model))


@lru_cache(maxsize=1)
def _bundled() -> CausalTransformer:
    return load_bundled()[0]


def conclude(outcomes: Outcomes) -> Conclusion:
    """Say what another scale costs a trained model, beside one that learns with it."""
    shipped, own = outcomes.where(part=BUNDLED), outcomes.where(part=OWN)
    head_dims = own.values("head_dim")
    costs = {scale: _cost(shipped, scale, "at once") for scale in OTHERS}
    checks = [
        Check("the bundled model does best with the scale it was trained with",
              all(cost.low > 0 for cost in costs.values()),
              "; ".join(f"{NAMES[scale]} {cost:+.2g}" for scale, cost in costs.items())),
        *(_cost_check(own.where(head_dim=head_dim), head_dim) for head_dim in head_dims),
    ]  # fmt: skip
    losses = {scale: f"{shipped.band(f'{scale} at once'):.2f}" for scale in SCALES}
    text = " ".join([
        f"The bundled model, trained with {KEPT}, has a held-out loss of {losses[KEPT]} nats; "
        + ", ".join(f"{NAMES[scale]} {losses[scale]}" for scale in OTHERS) + ".",
        *(_at(own.where(head_dim=head_dim), head_dim) for head_dim in head_dims),
        tally(checks),
    ])  # fmt: skip
    return Conclusion(text, tuple(checks), _tables(shipped, own), _plots(own))


def _cost(outcomes: Outcomes, scale: str, when: str) -> Band:
    """Return what a scale costs against the one trained with, paired by seed."""
    cells = [(own, {"cost": found[f"{scale} {when}"] - found[f"{KEPT} {when}"]}) for own, found in outcomes]
    return Outcomes(cells).band("cost")


def _excess(own: Outcomes) -> Band:
    """Return the cost of no scale to a trained model minus half of its cost to an untrained one."""
    cells = [
        (settings, {"excess": found["none at once"] - found[f"{KEPT} at once"]
                    - SLIGHT * (found["none from the start"] - found[f"{KEPT} from the start"])})
        for settings, found in own
    ]  # fmt: skip
    return Outcomes(cells).band("excess")


def _cost_check(own: Outcomes, head_dim: int) -> Check:
    once, fresh = (_cost(own, "none", when) for when in ("at once", "from the start"))
    return Check(f"d_k = {head_dim}: removing the scale costs a trained model less than half of what it costs an "
                 "untrained one", is_below_zero(_excess(own)), f"{once:+.2g} against {fresh:+.2g} nats")  # fmt: skip


def _at(own: Outcomes, head_dim: int) -> str:
    parts = (
        f"{NAMES[scale]} " + ", ".join(f"{_cost(own, scale, when):+.2g} {when}" for when in MOMENTS)
        for scale in OTHERS
    )  # fmt: skip
    return f"Cost in nats at d_k = {head_dim}: {'; '.join(parts)}."


def _tables(shipped: Outcomes, own: Outcomes) -> tuple[Table, ...]:
    first = []
    for scale in SCALES:
        found = shipped.band(f"{scale} at once")
        first.append((NAMES[scale], *column([found.mean, found.margin])))
    rows = tuple(
        (head_dim, NAMES[scale], *column([own.band(f"{scale} {when}", head_dim=head_dim).mean for when in MOMENTS]))
        for head_dim in own.values("head_dim") for scale in SCALES
    )  # fmt: skip
    return (
        Table("The bundled model, held-out loss in nats", ("scale", "loss", "±"), tuple(first)),
        Table(f"Trained with {KEPT}, then changed; held-out loss in nats", ("d_k", "scale", *MOMENTS), rows),
    )


def _plots(own: Outcomes) -> tuple[Plot, ...]:
    notices = {
        "at once": f"All were trained with {KEPT}; only the scale was changed.",
        "after more training": "A third of the steps, with the new scale.",
        "from the start": "Cost of the same scale to an untrained model.",
    }
    head_dims = own.values("head_dim")

    def bands(scale: str, when: str) -> list[Band]:
        return [own.band(f"{scale} {when}", head_dim=head_dim) for head_dim in head_dims]

    return tuple(
        Plot(f"Loss with another scale {when}", "d_k", "held-out loss, nats",
             tuple(banded(NAMES[scale], head_dims, bands(scale, when)) for scale in SCALES), notice, log_x=True)
        for when, notice in notices.items()
    )  # fmt: skip


EXPERIMENT = Experiment("trained", "Does a trained model still need the scale it was trained with?", grid, run,
                        conclude, seeds=4, quick_seeds=3, trains=True, version=2, core_minutes=16)  # fmt: skip
