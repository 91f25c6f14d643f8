"""Does a trained model still need the scale it was trained with?"""

import math
from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache

from attnscale.lab.bands import Band
from attnscale.lab.cell import Outcome, Settings
from attnscale.lab.comparing import effect
from attnscale.lab.experiment import Conclusion, Experiment
from attnscale.lab.outcomes import Outcomes, banded
from attnscale.lab.result import Check, Plot, Table, column
from attnscale.lab.swapping import SCALES, swap_scale, swapped
from attnscale.lab.tasks import TASKS, Batch, Characters
from attnscale.lab.training import Schedule, evaluating, held_out_loss, seeded_model, trained
from attnscale.models import load_bundled
from attnscale.models.transformer import CausalTransformer

BUNDLED, OWN = "bundled model", "trained here"
KEPT = "1/√d_k"  # what all were trained with
OTHERS = tuple(scale for scale in SCALES if scale != KEPT)
PARTS, WINDOWS = 8, 4  # of the text held out: a part a seed, each of so many windows
LEARNING_ON = 3  # a third of the steps, at a third of the rate
SLIGHT = 0.5  # a share of what it costs an untrained model that is less


def grid(quick: bool) -> Sequence[Settings]:
    """The bundled model; and models of every d_k, trained first."""
    tasks, head_dims = ({"easy recall": 80}, [16, 256]) if quick else ({"recall": 300}, [16, 64, 256])
    own: list[Settings] = [
        {"part": OWN, "task": task, "steps": steps, "head_dim": head_dim}
        for task, steps in tasks.items() for head_dim in head_dims
    ]  # fmt: skip
    return [{"part": BUNDLED}, *own]


def run(part: str, seed: int, task: str = "recall", steps: int = 1, head_dim: int = 2, device: str = "cpu") -> Outcome:
    """Losses in nats under every scale: at once, after learning on with it, and learned with it from the start."""
    if part == BUNDLED:
        return {f"{scale} at once": bundled_loss(scale, seed) for scale in SCALES}
    of, is_easy = TASKS[task], task == "easy recall"
    rate, shape = (0.005, {"d_model": 32, "heads": 1}) if is_easy else (0.003, {})
    schedule, going_on = Schedule(steps, rate, seed), Schedule(steps // LEARNING_ON, rate / LEARNING_ON, seed + 1)

    def fresh(scale: str) -> CausalTransformer:
        return seeded_model(of.vocabulary, seed, head_dim=head_dim, scale=SCALES[scale], **shape).to(device)

    learned, found = fresh(KEPT), {}
    trained(learned, of, schedule)
    for scale in SCALES:
        model = deepcopy(learned)
        swap_scale(model, scale)
        found[f"{scale} at once"] = held_out_loss(model, of)
        found[f"{scale} learning on"] = trained(model, of, going_on).final
        found[f"{scale} from the start"] = (
            found[f"{scale} at once"] if scale == KEPT else trained(fresh(scale), of, schedule).final
        )
    return found


def bundled_loss(scale: str, part: int = 0) -> float:
    """The loss of the model that ships with the package, on a part of the text held out, under another scale."""
    model = _bundled()
    windows = Characters(model.context).held_out(PARTS * WINDOWS)
    own = slice(part % PARTS, None, PARTS)  # every part from all over the text
    with swapped(model, scale), evaluating(model):
        return float(Batch(windows.tokens[own], windows.targets[own]).loss(model))


@lru_cache(maxsize=1)
def _bundled() -> CausalTransformer:
    return load_bundled()[0]


def conclude(outcomes: Outcomes) -> Conclusion:
    """What another scale costs a trained model, at once and after learning on, beside an untrained one."""
    shipped, own = outcomes.where(part=BUNDLED), outcomes.where(part=OWN)
    head_dims = own.values("head_dim")
    checks = [
        Check("the bundled model does best with the scale it was trained with",
              all(_cost(shipped, scale, "at once").low > 0 for scale in OTHERS),
              "; ".join(f"{_named(scale)} {effect(_cost(shipped, scale, 'at once'))}" for scale in OTHERS)),
        *(_less(own.where(head_dim=head_dim), head_dim) for head_dim in head_dims),
    ]  # fmt: skip
    text = (
        f"The bundled model, trained with {KEPT}, has a loss of {shipped.band(f'{KEPT} at once'):.2f} nats on text "
        "held out; "
        + ", ".join(f"{_named(scale)} {shipped.band(f'{scale} at once'):.2f}" for scale in OTHERS)
        + ". "
        + " ".join(_at(own.where(head_dim=head_dim), head_dim) for head_dim in head_dims)
        + f" {_summary(own, head_dims)}"
    )
    return Conclusion(text, tuple(checks), _tables(shipped, own), _plots(own))


def _cost(outcomes: Outcomes, scale: str, when: str) -> Band:
    """How much a scale costs against the one kept, seed by seed."""
    kept = f"{KEPT} at once" if when == "at once" else f"{KEPT} {when}"
    cells = [(own, {"cost": found[f"{scale} {when}"] - found[kept]}) for own, found in outcomes]
    return Outcomes(cells).band("cost")


def spared(own: Outcomes) -> Band:
    """By how much leaving the scale out costs a trained model less than half of what it costs an untrained one."""
    cells = [
        (settings, {"spared": SLIGHT * (found["none from the start"] - found[f"{KEPT} from the start"])
                    - (found["none at once"] - found[f"{KEPT} at once"])})
        for settings, found in own
    ]  # fmt: skip
    return Outcomes(cells).band("spared")


def _less(own: Outcomes, head_dim: int) -> Check:
    once, fresh = (_cost(own, "none", when) for when in ("at once", "from the start"))
    return Check(f"d_k = {head_dim}: leaving the scale out costs a trained model less than half of what it costs an "
                 "untrained one", spared(own).low > 0, f"{effect(once)} against {effect(fresh)} nats")  # fmt: skip


def _at(own: Outcomes, head_dim: int) -> str:
    parts = []
    for scale in OTHERS:
        once, on, fresh = (effect(_cost(own, scale, when)) for when in ("at once", "learning on", "from the start"))
        parts.append(f"{_named(scale)} {once} at once, {on} after learning on, {fresh} if learned so from the start")
    return f"Against {KEPT} at d_k = {head_dim}, in nats: {'; '.join(parts)}."


def _summary(own: Outcomes, head_dims: Sequence[int]) -> str:
    words = {head_dim: _word(spared(own.where(head_dim=head_dim))) for head_dim in head_dims}
    groups = {word: [str(each) for each in head_dims if words[each] == word] for word in dict.fromkeys(words.values())}
    said = "; ".join(f"at d_k = {', '.join(own)} {word}" for word, own in groups.items())
    asked = "Does leaving it out cost a trained model less than half of what it costs an untrained one?"
    return f"{asked} {said[0].upper()}{said[1:]}."


def _word(spared: Band) -> str:
    if spared.low > 0:
        return "yes"
    return "no" if spared.high < 0 else "undecided"


def _named(scale: str) -> str:
    return "without a scale" if scale == "none" else f"with {scale}"


def _tables(shipped: Outcomes, own: Outcomes) -> tuple[Table, ...]:
    moments = ("at once", "learning on", "from the start")
    first = tuple((_named(scale), *_numbers(shipped.band(f"{scale} at once"))) for scale in SCALES)
    rows = tuple(
        (head_dim, _named(scale),
         *column([own.band(f"{scale} {when}", head_dim=head_dim).mean for when in moments]))
        for head_dim in own.values("head_dim") for scale in SCALES
    )  # fmt: skip
    return (
        Table("The bundled model, nats on text held out", ("scale", "loss", "±"), first),
        Table(f"Trained with {KEPT}, then swapped; nats held out", ("d_k", "scale", *moments), rows),
    )


def _numbers(found: Band) -> tuple[float | None, ...]:
    return column([found.mean, found.half if math.isfinite(found.half) else math.nan])


def _plots(own: Outcomes) -> tuple[Plot, ...]:
    head_dims = own.values("head_dim")
    return tuple(
        Plot(f"Loss {title}", "d_k", "held-out loss, nats",
             tuple(banded(_named(scale), head_dims,
                          [own.band(f"{scale} {when}", head_dim=head_dim) for head_dim in head_dims])
                   for scale in SCALES), notice, log_x=True)
        for when, title, notice in (
            ("at once", "as soon as the scale is another", f"All were trained with {KEPT}; nothing else was changed."),
            ("learning on", "after learning on with it", "What training makes up for, in a third of its steps."),
            ("from the start", "if learned with it from the start", "What the same scale costs an untrained model."),
        )
    )  # fmt: skip


EXPERIMENT = Experiment("trained", "Does a trained model still need the scale it was trained with?", grid, run,
                        conclude, seeds=4, quick_seeds=3, trains=True, core_minutes=16)  # fmt: skip
