"""No divisor, √d_k or d_k: what each does to variance, entropy, output and gradients as d_k grows."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from attnscale.lab.bands import Band, band
from attnscale.lab.cell import Outcome, Settings
from attnscale.lab.experiment import Conclusion, Experiment
from attnscale.lab.outcomes import Outcomes
from attnscale.lab.result import Curve, Plot, Table, column
from attnscale.lab.wording import percent, tally, times
from attnscale.measure import score_stats
from attnscale.operator import attention
from attnscale.rules import get_rule
from attnscale.theory import expected_row, score_variance

TABLES, ROWS, KEYS, VALUE_DIM = 8, 64, 256, 16
RULES = {"none": "unscaled", "√d_k": "inverse_sqrt", "d_k": "inverse_dim"}
POWERS = {"none": 0.0, "√d_k": -0.5, "d_k": -1.0}  # of d_k, by which each multiplies
DEAF = 0.1  # under this share of the output that follows the query, attention is an average
STEADY = 0.05  # an exponent of d_k this small is none


def grid(quick: bool) -> Sequence[Settings]:
    """Every divisor at every d_k."""
    head_dims = [4, 16, 64, 256] if quick else [4, 16, 64, 256, 1024, 4096]
    return [{"divisor": divisor, "head_dim": head_dim} for divisor in RULES for head_dim in head_dims]


def run(divisor: str, head_dim: int, seed: int) -> Outcome:
    """What becomes of unit-variance q, k and v, and the gradient of a random loss on scores and queries."""
    rule = get_rule(RULES[divisor])
    query, key = torch.randn(TABLES, ROWS, head_dim), torch.randn(TABLES, KEYS, head_dim)
    value, pull = torch.randn(TABLES, KEYS, VALUE_DIM), torch.randn(TABLES, ROWS, VALUE_DIM)
    stats = score_stats(query, key, scale=rule)
    query.requires_grad_()
    added = torch.zeros(TABLES, ROWS, KEYS, requires_grad=True)  # to the scores: its gradient is theirs
    output = attention(query, key, value, attn_mask=added, scale=rule)
    on_query, on_scores = torch.autograd.grad((output * pull).sum(), (query, added))
    output = output.detach()
    sizes = on_query.norm(dim=-1)
    return {
        "variance": stats.variance.mean().item(),
        "entropy_ratio": stats.entropy_ratio.mean().item(),
        "gradient_gain": stats.gradient_gain.mean().item(),
        "passed": (on_scores.square().sum(-1).mean() / VALUE_DIM).item(),
        "query_gradient": sizes.square().mean().sqrt().item(),
        "median_gradient": sizes.median().item(),
        "follows": (output.var(dim=-2).mean() / output.square().mean()).item(),
    }


TITLES = {
    "variance": "Var(scores)",
    "entropy_ratio": "H/ln n",
    "gradient_gain": "1 − Σp²",
    "passed": "‖diag(p) − ppᵀ‖²",
}


def expectation(measure: str, divisor: str, head_dims: Sequence[int]) -> dict[int, float]:
    """What theory says of a measure, at every d_k."""
    return {head_dim: _expected(head_dim ** POWERS[divisor], head_dim)[measure] for head_dim in head_dims}


def _expected(scale: float, head_dim: int) -> dict[str, float]:
    row = expected_row(scale * math.sqrt(head_dim), KEYS, head_dim)
    return {
        "variance": scale**2 * score_variance(head_dim),
        "entropy_ratio": row.entropy / math.log(KEYS),
        "gradient_gain": row.gradient_gain,
        "passed": row.jacobian_norm2,
    }


def conclude(outcomes: Outcomes) -> Conclusion:
    """What each divisor does at the largest d_k, and why it is not d_k."""
    head_dims, divisors = outcomes.values("head_dim"), outcomes.values("divisor")
    checks = [
        outcomes.check(f"divisor {divisor}: {title} is its exact expectation", measure,
                       expectation(measure, divisor, head_dims), "head_dim", len(divisors) * len(TITLES),
                       divisor=divisor)
        for divisor in divisors for measure, title in TITLES.items()
    ]  # fmt: skip
    largest = head_dims[-1]
    growth = {divisor: exponent(outcomes.where(divisor=divisor), "variance") for divisor in divisors}
    ratios = {
        (measure, divisor): outcomes.ratio(measure, {"divisor": divisor}, {"divisor": "√d_k"}, head_dim=largest)
        for measure in ("query_gradient", "median_gradient") for divisor in ("none", "d_k")
    }  # fmt: skip
    text = (
        "Var(scores) "
        + ", ".join(f"{_growing(growth[divisor])} {_under(divisor)}" for divisor in divisors)
        + f". At d_k = {largest} over {KEYS} keys "
        + "; ".join(_state(outcomes, divisor, largest) for divisor in divisors)
        + ". " + _why_not_dim(outcomes, largest, ratios["query_gradient", "d_k"]) + " "
        + _without(outcomes, largest, ratios["query_gradient", "none"], ratios["median_gradient", "none"]) + " "
        + tally(checks)
    )  # fmt: skip
    return Conclusion(text, tuple(checks), (_table(outcomes),), _plots(outcomes))


def exponent(outcomes: Outcomes, measure: str) -> Band:
    """The power of d_k that a measure follows, seed by seed."""
    head_dims = np.log(outcomes.values("head_dim"))
    return band(
        float(np.polyfit(head_dims, np.log(outcomes.samples(measure, seed=seed)), 1)[0])
        for seed in outcomes.values("seed")
    )


def _growing(power: Band) -> str:
    if abs(power.mean) < STEADY:
        return f"stays as it is (d_k^{power.mean:.2f})"
    return f"{'grows' if power.mean > 0 else 'falls'} as d_k^{power.mean:.2f}"


def _under(divisor: str) -> str:
    return "without a divisor" if divisor == "none" else f"divided by {divisor}"


def _state(outcomes: Outcomes, divisor: str, head_dim: int) -> str:
    entropy, follows = (
        outcomes.band(measure, divisor=divisor, head_dim=head_dim) for measure in ("entropy_ratio", "follows")
    )
    return f"{_under(divisor)} H/ln n is {entropy.mean:.3f} and {percent(follows.mean)} of the output follows the query"


def _why_not_dim(outcomes: Outcomes, head_dim: int, gradient: Band) -> str:
    follows = outcomes.band("follows", divisor="d_k", head_dim=head_dim).mean
    meaning = "attention is an average whatever is asked" if follows < DEAF else "attention still looks at the query"
    return f"So under d_k {meaning}, and the gradient on queries is {times(gradient)} that of √d_k."


def _without(outcomes: Outcomes, head_dim: int, whole: Band, median: Band) -> str:
    kept = outcomes.ratio("gradient_gain", {"divisor": "none"}, {"divisor": "√d_k"}, head_dim=head_dim)
    uneven = whole.low > 1 > median.high
    return (
        f"Without a divisor 1 − Σp² is {times(kept)} that of √d_k; the gradient on queries is {times(whole)} that "
        f"of √d_k in root mean square and {times(median)} in the median row"
        + (": a few rows near a tie are pushed hard, the others hardly at all." if uneven else ".")
    )


def _table(outcomes: Outcomes) -> Table:
    columns = ("divisor", "d_k", "variance", "H / ln n", "1 − Σp²", "follows query", "gradient on q", "median row")
    measures = ("variance", "entropy_ratio", "gradient_gain", "follows", "query_gradient", "median_gradient")
    rows = tuple(
        (divisor, head_dim, *(outcomes.band(name, divisor=divisor, head_dim=head_dim).mean for name in measures))
        for divisor in outcomes.values("divisor") for head_dim in outcomes.values("head_dim")
    )  # fmt: skip
    return Table(f"Three divisors, {KEYS} keys", columns, rows)


def _plots(outcomes: Outcomes) -> tuple[Plot, ...]:
    head_dims, divisors = outcomes.values("head_dim"), outcomes.values("divisor")

    def measured(measure: str) -> list[Curve]:
        return [outcomes.curve(divisor, "head_dim", measure, divisor=divisor) for divisor in divisors]

    def both(measure: str) -> tuple[Curve, ...]:
        theory = [
            Curve(f"{divisor}, expected", tuple(map(float, head_dims)),
                  column(list(expectation(measure, divisor, head_dims).values())), is_theory=True)
            for divisor in divisors
        ]  # fmt: skip
        return (*measured(measure), *theory)

    return (
        Plot("Variance of the scores", "d_k", "variance", both("variance"),
             "Where a line is level, d_k does not matter to the softmax.", log_x=True, log_y=True),
        Plot("Entropy", "d_k", "H / ln n", both("entropy_ratio"),
             "At 1 all keys count alike, at 0 one key takes all; attention chooses in between.", log_x=True),
        Plot("How much of the output follows the query", "d_k", "share of the variance", tuple(measured("follows")),
             "At 1 another query has another output; near 0 all get the same average.", log_x=True, log_y=True),
        Plot("What the softmax lets through", "d_k", "‖diag(p) − ppᵀ‖²", both("passed"),
             "The gradient on the scores: it needs keys that compete.", log_x=True, log_y=True),
        Plot("Gradient on the queries", "d_k", "root mean square", tuple(measured("query_gradient")),
             "What the softmax lets through, times the scale: a divisor is paid for twice.", log_x=True, log_y=True),
        Plot("Gradient on the queries, median row", "d_k", "median", tuple(measured("median_gradient")),
             _turning(outcomes.where(divisor="none")), log_x=True, log_y=True),
    )  # fmt: skip


def _turning(without: Outcomes) -> str:
    head_dims = without.values("head_dim")
    peak = max(head_dims, key=lambda head_dim: without.band("median_gradient", head_dim=head_dim).mean)
    falls = ", and falls beyond, as most rows see one key alone" if peak < head_dims[-1] else ""
    return f"Without a divisor it is largest at d_k = {peak}{falls}."


EXPERIMENT = Experiment("divisors", "None, √d_k or d_k: what does each do, and why not d_k?", grid, run, conclude,
                        seeds=16, quick_seeds=8, core_minutes=0.24)  # fmt: skip
