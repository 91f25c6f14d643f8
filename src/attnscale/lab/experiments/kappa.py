"""Loss against κ, the multiplier of the cosines of queries and keys (after arXiv:2309.14322, figure 10)."""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from attnscale.lab.experiment import Check, Conclusion, Experiment, Outcome, Plot, Settings, product
from attnscale.lab.outcomes import NEGLIGIBLE, Band, Outcomes, diverged_sentence, tally
from attnscale.lab.tasks import TASKS
from attnscale.lab.training import Schedule, seeded_run
from attnscale.rules.rule import Rule, Scaled, Visible

KAPPAS = (0.01, 0.1, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 100.0, 1000.0, 10_000.0)
FEW_KAPPAS = (0.01, 1.0, 4.0, 8.0, 16.0, 32.0, 100.0, 10_000.0)


def grid(quick: bool) -> Sequence[Settings]:
    """List every κ at every d_k."""
    if quick:
        size = {"d_model": 32, "heads": 1, "head_dim": 64}
        return product(task="easy recall", kappa=FEW_KAPPAS, steps=80, rate=0.005, **size)
    return product(task="recall", head_dim=[64, 16], kappa=KAPPAS, steps=300, rate=0.003, d_model=64, heads=2)


def normalised(kappa: float) -> Rule:
    """Return the rule κ · cos(q, k): both divided by their root mean square, and κ/d_k in the place of 1/√d_k."""

    def rule(query: Tensor, key: Tensor, visible: Visible = None) -> Scaled:
        width = query.shape[-1:]
        return F.rms_norm(query, width), F.rms_norm(key, width), kappa / width[0]

    return rule


def run(task: str, kappa: float, steps: int, rate: float, seed: int, device: str = "cpu", **shape: int) -> Outcome:
    """Train one model whose scores are κ times the cosines of its queries and keys."""
    _, before, found = seeded_run(TASKS[task], Schedule(steps, rate, seed), device, scale=normalised(kappa), **shape)
    return {"final": found.final, "diverged": found.diverged, "spread": before["std"],
            "entropy": before["entropy_ratio"]}  # fmt: skip


def conclude(outcomes: Outcomes) -> Conclusion:
    """Find the κ with the lowest loss at each d_k, and check if √d_k is on the floor of the curve."""
    checks, sentences = [], []
    for head_dim in sorted(outcomes.values("head_dim")):
        own = outcomes.where(head_dim=head_dim)
        losses = {kappa: own.band("final", kappa=kappa) for kappa in own.values("kappa")}
        best = min(losses, key=lambda kappa: losses[kappa].mean)
        sentences.append(_sentence(losses, head_dim, best))
        checks += _checks(own, head_dim, best)
    text = " ".join([*sentences, tally(checks), diverged_sentence(outcomes)])
    table = outcomes.table(
        "Loss against κ", {"head_dim": "d_k", "kappa": "κ"},
        {"final": "final loss ±", "spread": "spread at the start", "entropy": "entropy at the start (share of max)",
         "diverged": "diverged"},
    )  # fmt: skip
    names = {head_dim: f"d_k = {head_dim}" for head_dim in outcomes.values("head_dim")}
    curves = outcomes.curves("kappa", "final", "head_dim", names=names)
    plot = Plot("Loss against κ", "κ", "held-out loss, nats", curves,
                "Left: all keys weigh the same. Right: one key has all the weight. The floor is around κ = √d_k.",
                log_x=True)  # fmt: skip
    return Conclusion(text, checks, [table], [plot])


def _sentence(losses: dict[float, Band], head_dim: int, best: float) -> str:
    floor = [kappa for kappa, loss in losses.items() if loss.mean < losses[best].mean + NEGLIGIBLE]
    near = f"within {NEGLIGIBLE:g} of that from {floor[0]:g} to {floor[-1]:g}."
    alone = f"no other κ is within {NEGLIGIBLE:g} of that."
    return (
        f"At d_k = {head_dim}, √d_k = {math.sqrt(head_dim):g}, the loss is lowest at κ = {best:g} "
        f"({losses[best]} nats); {near if len(floor) > 1 else alone}"
    )


def _checks(own: Outcomes, head_dim: int, best: float) -> list[Check]:
    kappas, root = own.values("kappa"), math.sqrt(head_dim)

    def more(one: float, other: float) -> Band:
        return own.difference("final", {"kappa": one}, {"kappa": other}, points=len(kappas) - 1)

    above = more(root, best)
    checks = [
        Check(f"d_k = {head_dim}: κ = √d_k is on the floor", best == root or above.is_below(NEGLIGIBLE),
              f"{above:+.2g} nats above κ = {best:g}"),
    ]  # fmt: skip
    for end in (kappas[0], kappas[-1]):
        gain, cost = more(root, end), more(end, root)
        checks.append(
            Check(f"d_k = {head_dim}: κ = {end:g} is worse than √d_k", gain.is_below(0.0), f"{cost:+.2g} nats")
        )
    return checks


EXPERIMENT = Experiment(
    "kappa", "With normalised q and k, which multiplier of their cosine trains best?",
    grid, run, conclude, seeds=3, quick_seeds=2, trains=True, core_minutes=36,
)  # fmt: skip
