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
from attnscale.lab.result import Curve, Plot, Table, column
from attnscale.lab.wording import ranging, tally
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
    curves = 2 * len(cases)
    checks, rows, slopes = {}, [], {}
    largest = head_dims[-1]
    for name in cases:
        own, case = outcomes.where(case=name), CASES[name]
        variances, means = ({head_dim: of(head_dim) for head_dim in head_dims} for of in (case.variance, case.mean))
        checks[name] = [
            own.check(f"{name}: Var(q·k) = {case.variance(1):g} d_k", "variance", variances, "head_dim", curves),
            own.check(f"{name}: E[q·k] = {case.mean(1):g} d_k", "mean", means, "head_dim", curves),
        ]
        slopes[name] = _slope(own, head_dims)
        found = own.band("variance", head_dim=largest)
        rows.append((name, largest, variances[largest], found.mean, found.half, slopes[name]))
    plain = [name for name in cases if CASES[name].variance(1) == 1 and CASES[name].mean(1) == 0]
    others = [name for name in cases if name not in plain]
    equal = all(check.holds for name in plain for check in checks[name])
    text = (
        f"Var(q·k) grows as d_k to the power {ranging(slopes.values(), 4)} for d_k from {head_dims[0]} to {largest}. "
        f"For independent components of mean 0 and variance 1 it "
        + ("equals d_k, whatever the distribution" if equal else "was not confirmed to equal d_k")
        + f" ({', '.join(plain)}); divided by √d_k it is "
        + ranging((outcomes.band("scaled_variance", case=name, head_dim=largest).mean for name in plain), 3)
        + f" at d_k = {largest}. Other components have another constant: "
        + ", ".join(f"{outcomes.band('scaled_variance', case=name, head_dim=largest)} ({name})" for name in others)
        + ". "
    )
    every = tuple(check for own in checks.values() for check in own)
    columns = ("case", "d_k", "expected variance", "measured", "±", "exponent of d_k")
    table = Table("Variance of q·k", columns, tuple(rows))
    return Conclusion(text + tally(every), every, (table,), _plots(outcomes))


def _plots(outcomes: Outcomes) -> tuple[Plot, ...]:
    head_dims, cases = outcomes.values("head_dim"), outcomes.values("case")
    measured = [outcomes.curve(name, "head_dim", "variance", case=name) for name in cases]
    scaled = [outcomes.curve(name, "head_dim", "scaled_variance", case=name) for name in cases]
    theory = Curve("d_k", column(head_dims), column(head_dims), is_theory=True)  # type: ignore[arg-type]
    return (
        Plot("Variance of q·k", "d_k", "variance", (*measured, theory),
             "A slope of one: each component adds its share, whatever it is.", log_x=True, log_y=True),
        Plot("Variance of q·k/√d_k", "d_k", "variance", tuple(scaled),
             "Level where division by √d_k leaves nothing of d_k; means and likeness set the height.", log_x=True),
    )  # fmt: skip


def _slope(outcomes: Outcomes, head_dims: Sequence[int]) -> float:
    means = [outcomes.band("variance", head_dim=head_dim).mean for head_dim in head_dims]
    return float(np.polyfit(np.log(head_dims), np.log(means), 1)[0])


EXPERIMENT = Experiment(
    "variance", "Does Var(q·k) equal d_k?", grid, run, conclude, seeds=16, quick_seeds=8, core_minutes=3
)
