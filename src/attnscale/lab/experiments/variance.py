"""Does Var(q·k) equal d_k? For components of any distribution, with means, and with q and k that are alike."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnscale.lab.cell import Outcome, Settings
from attnscale.lab.experiment import Conclusion, Experiment
from attnscale.lab.outcomes import Outcomes
from attnscale.lab.result import Check, Curve, Plot, Table, column
from attnscale.theory import score_mean, score_variance

PAIRS = 4096  # of queries and keys a cell: a variance to 2% a seed
DRAWS: dict[str, Callable[..., Tensor]] = {  # of mean 0 and variance 1
    "normal": torch.randn,
    "uniform": lambda *shape: (2 * torch.rand(*shape) - 1) * math.sqrt(3),
    "signs": lambda *shape: 2.0 * torch.randint(0, 2, shape) - 1,
    "Laplace": lambda *shape: torch.distributions.Laplace(0.0, math.sqrt(0.5)).sample(shape),
}


@dataclass(frozen=True)
class Case:
    """How components are drawn; `correlation` is that of q_i with k_i."""

    draws: str
    query_mean: float = 0.0
    key_mean: float = 0.0
    correlation: float = 0.0

    def draw(self, head_dim: int) -> tuple[Tensor, Tensor]:
        """Queries and keys, (PAIRS, head_dim) each."""
        query, own = (DRAWS[self.draws](PAIRS, head_dim) for _ in range(2))
        key = self.correlation * query + math.sqrt(1 - self.correlation**2) * own
        return query + self.query_mean, key + self.key_mean

    def mean(self, head_dim: int) -> float:
        """E[q·k]."""
        return score_mean(head_dim, self.query_mean, self.key_mean) + head_dim * self.correlation

    def variance(self, head_dim: int) -> float:
        """Var[q·k]; a correlation adds ρ² a component for normal ones, E[x⁴] = 3."""
        return score_variance(head_dim, self.query_mean, 1.0, self.key_mean, 1.0) + head_dim * self.correlation**2


CASES = {
    "normal": Case("normal"),
    "uniform": Case("uniform"),
    "signs": Case("signs"),
    "Laplace": Case("Laplace"),
    "one mean 0.5": Case("normal", query_mean=0.5),
    "both means 1": Case("normal", query_mean=1.0, key_mean=1.0),
    "correlated 0.5": Case("normal", correlation=0.5),
    "q equals k": Case("normal", correlation=1.0),
}


def grid(quick: bool) -> Sequence[Settings]:
    """Every case at every d_k."""
    head_dims = [1, 4, 16, 64, 256] if quick else [2**power for power in range(13)]
    return [{"case": case, "head_dim": head_dim} for case in CASES for head_dim in head_dims]


def run(case: str, head_dim: int, seed: int) -> Outcome:
    """Mean and variance of q·k over pairs, and of q·k/√d_k."""
    query, key = CASES[case].draw(head_dim)
    scores = (query.double() * key.double()).sum(-1)
    variance = scores.var().item()
    return {"mean": scores.mean().item(), "variance": variance, "scaled_variance": variance / head_dim}


def conclude(outcomes: Outcomes) -> Conclusion:
    """Whether the closed form holds, and how the variance grows with d_k."""
    head_dims, cases = outcomes.values("head_dim"), outcomes.values("case")
    checks, rows, slopes = [], [], {}
    for name in cases:
        case = CASES[name]
        expected = {head_dim: case.variance(head_dim) for head_dim in head_dims}
        amiss = outcomes.agrees("variance", expected, "head_dim", case=name)
        slopes[name] = _slope(outcomes.where(case=name), head_dims)
        per_dim = case.variance(1)
        evidence = f"measured at {len(head_dims)} sizes, {len(amiss)} outside the band"
        checks.append(Check(f"{name}: Var(q·k) = {per_dim:g} d_k", not amiss, evidence))
        largest = head_dims[-1]
        found = outcomes.band("variance", case=name, head_dim=largest)
        rows.append((name, largest, expected[largest], found.mean, found.half, slopes[name]))
    plain = [name for name in cases if CASES[name].variance(1) == 1 and CASES[name].mean(1) == 0]
    others = {name: CASES[name].variance(1) for name in cases if CASES[name].variance(1) != 1}
    worst = max(abs(slope - 1) for slope in slopes.values())
    failed = [check.statement for check in checks if not check.holds]
    text = (
        f"Var(q·k) grows as d_k to the power {min(slopes.values()):.3f} to {max(slopes.values()):.3f} (expected 1, "
        f"largest departure {worst:.3f}) for d_k from {head_dims[0]} to {head_dims[-1]}. "
        f"For independent components of mean 0 and variance 1 ({', '.join(plain)}) it "
        + ("equals d_k whatever the distribution" if not set(failed) & _statements(plain) else "does not equal d_k")
        + "; dividing by √d_k brings it to one. Otherwise the constant is another: "
        + ", ".join(f"{value:g} d_k for {name}" for name, value in others.items())
        + (". The closed form holds in every case." if not failed else f". It fails for {'; '.join(failed)}.")
    )
    columns = ("case", "d_k", "expected variance", "measured", "±", "exponent of d_k")
    return Conclusion(text, tuple(checks), (Table("Variance of q·k", columns, tuple(rows)),), _plots(outcomes))


def _plots(outcomes: Outcomes) -> tuple[Plot, ...]:
    head_dims, cases = outcomes.values("head_dim"), outcomes.values("case")
    measured = [outcomes.curve(name, "head_dim", "variance", case=name) for name in cases]
    scaled = [outcomes.curve(name, "head_dim", "scaled_variance", case=name) for name in cases]
    theory = Curve("d_k", column(head_dims), column(head_dims), is_theory=True)  # type: ignore[arg-type]
    return (
        Plot("Variance of q·k", "d_k", "variance", (*measured, theory),
             "Straight lines of slope one: each component adds its share.", log_x=True, log_y=True),
        Plot("Variance of q·k/√d_k", "d_k", "variance", tuple(scaled),
             "Flat: after division by √d_k nothing is left of d_k, but means and likeness stay.", log_x=True),
    )  # fmt: skip


def _statements(cases: Sequence[str]) -> set[str]:
    return {f"{name}: Var(q·k) = {CASES[name].variance(1):g} d_k" for name in cases}


def _slope(outcomes: Outcomes, head_dims: Sequence[int]) -> float:
    means = [outcomes.band("variance", head_dim=head_dim).mean for head_dim in head_dims]
    return float(np.polyfit(np.log(head_dims), np.log(means), 1)[0])


EXPERIMENT = Experiment("variance", "Does Var(q·k) equal d_k?", grid, run, conclude)
