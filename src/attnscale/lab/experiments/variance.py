"""Does Var(q·k) equal d_k? Components of several distributions, with means, and correlated q and k."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnscale.lab.experiment import Conclusion, Curve, Experiment, Outcome, Plot, Settings, Table, product
from attnscale.lab.outcomes import Outcomes, ranging, tally
from attnscale.theory import score_mean, score_variance

PAIRS = 4096  # pairs of q and k in a cell; the variance is within 2% for each seed
DRAWS: dict[str, Callable[..., Tensor]] = {  # of mean 0 and variance 1
    "normal": torch.randn,
    "uniform": lambda *shape: (2 * torch.rand(*shape) - 1) * math.sqrt(3),
    "signs": lambda *shape: 2.0 * torch.randint(0, 2, shape) - 1,
    "Laplace": lambda *shape: torch.distributions.Laplace(0.0, math.sqrt(0.5)).sample(shape),
}


@dataclass(frozen=True)
class Case:
    """Distribution of the components; `correlation` is that of q_i and k_i."""

    draws: str
    query_mean: float = 0.0
    key_mean: float = 0.0
    correlation: float = 0.0

    def draw(self, head_dim: int) -> tuple[Tensor, Tensor]:
        """Draw queries and keys, (PAIRS, head_dim) each."""
        query, own = (DRAWS[self.draws](PAIRS, head_dim) for _ in range(2))
        key = self.correlation * query + math.sqrt(1 - self.correlation**2) * own
        return query + self.query_mean, key + self.key_mean

    def mean(self, head_dim: int) -> float:
        """Return E[q·k]."""
        return score_mean(head_dim, self.query_mean, self.key_mean) + head_dim * self.correlation

    def variance(self, head_dim: int) -> float:
        """Return Var[q·k]; a correlation adds ρ² for each normal component, since E[x⁴] = 3."""
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
    """List every case at every d_k."""
    return product(case=CASES, head_dim=[1, 4, 16, 64, 256] if quick else [2**power for power in range(13)])


def run(case: str, head_dim: int, seed: int) -> Outcome:
    """Measure mean and variance of q·k, and the variance of q·k/√d_k."""
    query, key = CASES[case].draw(head_dim)
    scores = (query.double() * key.double()).sum(-1)
    variance = scores.var().item()
    return {"mean": scores.mean().item(), "variance": variance, "scaled_variance": variance / head_dim}


def conclude(outcomes: Outcomes) -> Conclusion:
    """Compare mean and variance with theory, and describe the growth of the variance."""
    head_dims, cases = outcomes.values("head_dim"), outcomes.values("case")
    smallest, largest = head_dims[0], head_dims[-1]
    checks, rows, powers, curves = {}, [], {}, 2 * len(cases)
    for name in cases:
        own, case = outcomes.where(case=name), CASES[name]
        checks[name] = [
            own.check(f"{name}: Var(q·k) = {case.variance(1):g} d_k", "variance", case.variance, "head_dim", curves),
            own.check(f"{name}: E[q·k] = {case.mean(1):g} d_k", "mean", case.mean, "head_dim", curves),
        ]
        powers[name] = own.exponent("variance", "head_dim").mean
        found = own.band("variance", head_dim=largest)
        rows.append((name, largest, case.variance(largest), found.mean, found.margin, powers[name]))
    plain = [name for name in cases if CASES[name].variance(1) == 1 and CASES[name].mean(1) == 0]
    equal = all(check.holds for name in plain for check in checks[name])
    scaled = {name: outcomes.band("scaled_variance", case=name, head_dim=largest) for name in cases}
    every = [check for own in checks.values() for check in own]
    text = (
        f"From d_k = {smallest} to {largest}, Var(q·k) grows as d_k to the power {ranging(powers.values(), 4)}. "
        f"For independent components with mean 0 and variance 1 it {'equals' if equal else 'was not found to equal'} "
        f"d_k, for each distribution tried ({', '.join(plain)}): after division by √d_k it is "
        f"{ranging(scaled[name].mean for name in plain)} at d_k = {largest}. Other components give another constant: "
        + ", ".join(f"{scaled[name]} ({name})" for name in cases if name not in plain)
        + f". {tally(every)}"
    )
    columns = ("case", "d_k", "expected variance", "measured", "±", "exponent of d_k")
    return Conclusion(text, every, [Table("Variance of q·k", columns, tuple(rows))], _plots(outcomes))


def _plots(outcomes: Outcomes) -> tuple[Plot, ...]:
    head_dims = tuple(map(float, outcomes.values("head_dim")))
    return (
        Plot("Variance of q·k", "d_k", "variance",
             (*outcomes.curves("head_dim", "variance", "case"), Curve("d_k", head_dims, head_dims, is_theory=True)),
             "Slope one: every component adds the same variance.", log_x=True, log_y=True),
        Plot("Variance of q·k/√d_k", "d_k", "variance", outcomes.curves("head_dim", "scaled_variance", "case"),
             "Level: division by √d_k removes d_k. Means and correlation set the height.", log_x=True),
    )  # fmt: skip


EXPERIMENT = Experiment(
    "variance", "Does Var(q·k) equal d_k?", grid, run, conclude, seeds=16, quick_seeds=8, core_minutes=2.2
)
