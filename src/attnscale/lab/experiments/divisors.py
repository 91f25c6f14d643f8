"""No divisor, √d_k or d_k: variance, entropy, output and gradients as d_k grows."""

import math
from collections.abc import Sequence

import torch

from attnscale.lab.experiment import Conclusion, Experiment, Outcome, Settings
from attnscale.lab.outcomes import Outcomes, percent, tally, times
from attnscale.lab.result import Curve, Plot
from attnscale.measure import score_stats
from attnscale.operator import attention
from attnscale.rules import get_rule
from attnscale.theory import expected_row, score_variance

TABLES, ROWS, KEYS, VALUE_DIM = 8, 64, 256, 16
RULES = {"none": "unscaled", "√d_k": "inverse_sqrt", "d_k": "inverse_dim"}
POWERS = {"none": 0.0, "√d_k": -0.5, "d_k": -1.0}  # of d_k, that multiply q·k
NAMES = {"none": "without a divisor", "√d_k": "divided by √d_k", "d_k": "divided by d_k"}
TITLES = {"variance": "Var(scores)", "entropy_ratio": "entropy", "jacobian_trace": "1 − Σp²",
          "passed": "‖diag(p) − ppᵀ‖²"}  # fmt: skip
NO_QUERY = 0.1  # below this share of output variance due to the query, attention is an average
STEADY = 0.05  # an exponent of d_k below this counts as zero


def grid(quick: bool) -> Sequence[Settings]:
    """List every divisor at every d_k."""
    head_dims = [4, 16, 64, 256] if quick else [4, 16, 64, 256, 1024, 4096]
    return [{"divisor": divisor, "head_dim": head_dim} for divisor in RULES for head_dim in head_dims]


def run(divisor: str, head_dim: int, seed: int) -> Outcome:
    """Measure attention over unit-variance q, k and v, and the gradient of a random loss on scores and queries."""
    rule = get_rule(RULES[divisor])
    query, key = torch.randn(TABLES, ROWS, head_dim), torch.randn(TABLES, KEYS, head_dim)
    value, upstream = torch.randn(TABLES, KEYS, VALUE_DIM), torch.randn(TABLES, ROWS, VALUE_DIM)
    stats = score_stats(query, key, scale=rule)
    query.requires_grad_()
    added = torch.zeros(TABLES, ROWS, KEYS, requires_grad=True)  # to the scores: its gradient is theirs
    output = attention(query, key, value, attn_mask=added, scale=rule)
    on_query, on_scores = torch.autograd.grad((output * upstream).sum(), (query, added))
    output = output.detach()
    sizes = on_query.norm(dim=-1)
    return {
        "variance": stats.variance.mean().item(),
        "entropy_ratio": stats.entropy_ratio.mean().item(),
        "jacobian_trace": stats.jacobian_trace.mean().item(),
        "passed": (on_scores.square().sum(-1).mean() / VALUE_DIM).item(),
        "query_gradient": sizes.square().mean().sqrt().item(),
        "median_gradient": sizes.median().item(),
        "follows": (output.var(dim=-2).mean() / output.square().mean()).item(),
    }


def expectation(measure: str, divisor: str, head_dims: Sequence[int]) -> dict[int, float]:
    """Return what theory says of a measure at every d_k."""
    return {head_dim: _expected(head_dim ** POWERS[divisor], head_dim)[measure] for head_dim in head_dims}


def _expected(scale: float, head_dim: int) -> dict[str, float]:
    row = expected_row(scale * math.sqrt(head_dim), KEYS, head_dim)
    return {
        "variance": scale**2 * score_variance(head_dim),
        "entropy_ratio": row.entropy / math.log(KEYS),
        "jacobian_trace": row.jacobian_trace,
        "passed": row.jacobian_norm2,
    }


def conclude(outcomes: Outcomes) -> Conclusion:
    """Compare each divisor with theory, and say why d_k and none are worse."""
    head_dims, divisors = outcomes.values("head_dim"), outcomes.values("divisor")
    largest, curves = head_dims[-1], len(RULES) * len(TITLES)
    checks = [
        outcomes.check(f"{NAMES[divisor]}, {title} matches theory", measure,
                       expectation(measure, divisor, head_dims), "head_dim", curves, divisor=divisor)
        for divisor in divisors for measure, title in TITLES.items()
    ]  # fmt: skip
    text = " ".join([
        f"Var(scores) {', '.join(_growth(outcomes, divisor) for divisor in divisors)}.",
        f"At d_k = {largest} over {KEYS} keys: "
        + "; ".join(_state(outcomes, divisor, largest) for divisor in divisors) + ".",
        _on_dim(outcomes, largest), _on_none(outcomes, largest), tally(checks),
    ])  # fmt: skip
    table = outcomes.table(
        f"Three divisors, {KEYS} keys", {"divisor": "divisor", "head_dim": "d_k"},
        {"variance": "variance", "entropy_ratio": "entropy (share of max)", "jacobian_trace": "1 − Σp²",
         "follows": "output variance due to query", "query_gradient": "gradient on q",
         "median_gradient": "median query"},
    )  # fmt: skip
    return Conclusion(text, tuple(checks), (table,), _plots(outcomes))


def _growth(outcomes: Outcomes, divisor: str) -> str:
    power = outcomes.where(divisor=divisor).exponent("variance", "head_dim").mean
    way = "does not change" if abs(power) < STEADY else "grows" if power > 0 else "falls"
    return f"{way} {NAMES[divisor]} (d_k^{power:.2f})"


def _state(outcomes: Outcomes, divisor: str, head_dim: int) -> str:
    entropy, follows = (
        outcomes.band(measure, divisor=divisor, head_dim=head_dim).mean for measure in ("entropy_ratio", "follows")
    )
    return f"{NAMES[divisor]}, entropy is {percent(entropy)} of its maximum and {percent(follows)} of the output " \
           "variance is due to the query"  # fmt: skip


def _against_root(outcomes: Outcomes, measure: str, divisor: str, head_dim: int) -> str:
    return times(outcomes.ratio(measure, {"divisor": divisor}, {"divisor": "√d_k"}, head_dim=head_dim))


def _on_dim(outcomes: Outcomes, head_dim: int) -> str:
    follows = outcomes.band("follows", divisor="d_k", head_dim=head_dim).mean
    meaning = "gives almost the same average to every query" if follows < NO_QUERY else "still depends on the query"
    gradient = _against_root(outcomes, "query_gradient", "d_k", head_dim)
    return f"So attention divided by d_k {meaning}; its gradient on queries, against √d_k, is {gradient}."


def _on_none(outcomes: Outcomes, head_dim: int) -> str:
    gain, gradient, median = (
        _against_root(outcomes, measure, "none", head_dim)
        for measure in ("jacobian_trace", "query_gradient", "median_gradient")
    )
    return (
        f"Without a divisor, against √d_k, 1 − Σp² is {gain}, and the gradient on queries is {gradient} in root mean "
        f"square and {median} for the median query."
    )


def _plots(outcomes: Outcomes) -> tuple[Plot, ...]:
    def curves(measure: str) -> tuple[Curve, ...]:
        theory = None if measure not in TITLES else lambda divisor, at: expectation(measure, divisor, [at])[at]
        return outcomes.curves("head_dim", measure, "divisor", theory=theory)

    return (
        Plot("Variance of the scores", "d_k", "variance", curves("variance"),
             "Level: softmax behaves the same at every d_k.", log_x=True, log_y=True),
        Plot("Entropy", "d_k", "entropy / ln n", curves("entropy_ratio"),
             "1: all keys have the same weight. 0: one key has all of it.", log_x=True),
        Plot("Output variance due to the query", "d_k", "share", curves("follows"),
             "Near 0 every query gets the same average.", log_x=True, log_y=True),
        Plot("Softmax Jacobian", "d_k", "‖diag(p) − ppᵀ‖²", curves("passed"),
             "Gradient at the scores, per unit of gradient at the weights.", log_x=True, log_y=True),
        Plot("Gradient on the queries", "d_k", "root mean square", curves("query_gradient"),
             "The Jacobian times the scale: a divisor also divides the gradient.", log_x=True, log_y=True),
        Plot("Gradient on the median query", "d_k", "median", curves("median_gradient"),
             "Without a divisor it grows with d_k at first, and falls when d_k is very large.", log_x=True, log_y=True),
    )  # fmt: skip


EXPERIMENT = Experiment("divisors", "No divisor, √d_k or d_k: what does each do, and why not d_k?", grid, run,
                        conclude, seeds=16, quick_seeds=8, core_minutes=0.24)  # fmt: skip
