"""No divisor, √d_k or d_k: variance, entropy, output and gradients as d_k grows."""

import math
from collections.abc import Mapping, Sequence

import torch

from attnscale.lab.experiment import Conclusion, Curve, Experiment, Outcome, Plot, Settings, Table
from attnscale.lab.outcomes import Outcomes, band, percent, tally
from attnscale.lab.training import gradient_shares
from attnscale.measure import score_stats
from attnscale.operator import attention
from attnscale.rules import get_rule
from attnscale.theory import expected_row

TABLES, ROWS, KEYS, VALUE_DIM = 8, 64, 256, 64
RULES = {"none": "unscaled", "√d_k": "inverse_sqrt", "d_k": "inverse_dim"}
POWERS = {"none": 0.0, "√d_k": -0.5, "d_k": -1.0}  # of d_k, that multiply q·k
NAMES = {"none": "without a divisor", "√d_k": "divided by √d_k", "d_k": "divided by d_k"}
TITLES = {"variance": "Var(scores)", "entropy_ratio": "entropy", "jacobian_trace": "1 − Σp²",
          "passed": "‖diag(p) − ppᵀ‖²"}  # fmt: skip
ALONG, SHAPES = "along d_k", "shapes"
KINDS = ((24, 64), (64, 64), (64, 1024), (256, 256), (512, 64))  # d_k and keys whose gradients are compared


def grid(quick: bool) -> Sequence[Settings]:
    """List every divisor at every d_k, and the shapes whose gradients are compared."""
    head_dims = [4, 16, 64, 256] if quick else [4, 16, 64, 256, 1024, 4096]
    along: list[Settings] = [
        {"part": ALONG, "divisor": divisor, "head_dim": head_dim, "keys": KEYS}
        for divisor in RULES for head_dim in head_dims
    ]  # fmt: skip
    shapes: list[Settings] = [
        {"part": SHAPES, "divisor": divisor, "head_dim": head_dim, "keys": keys}
        for head_dim, keys in KINDS for divisor in ("none", "√d_k")
    ]  # fmt: skip
    return along + shapes


def run(part: str, divisor: str, head_dim: int, keys: int, seed: int) -> Outcome:
    """Measure attention over unit-variance q, k and v, and the gradient of a random loss on scores and queries."""
    rule = get_rule(RULES[divisor])
    query, key = torch.randn(TABLES, ROWS, head_dim), torch.randn(TABLES, keys, head_dim)
    value, upstream = torch.randn(TABLES, keys, VALUE_DIM), torch.randn(TABLES, ROWS, VALUE_DIM)
    stats = score_stats(query, key, scale=rule)
    query.requires_grad_()
    added = torch.zeros(TABLES, ROWS, keys, requires_grad=True)  # to the scores: its gradient is theirs
    output = attention(query, key, value, attn_mask=added, scale=rule)
    on_query, on_scores = torch.autograd.grad((output * upstream).sum(), (query, added))
    output = output.detach()
    sizes, row_sizes = on_query.norm(dim=-1), on_scores.norm(dim=-1)
    return {
        "variance": stats.variance.mean().item(),
        "entropy_ratio": stats.entropy_ratio.mean().item(),
        "jacobian_trace": stats.jacobian_trace.mean().item(),
        "passed": (row_sizes.square().mean() / VALUE_DIM).item(),
        "query_gradient": sizes.square().mean().sqrt().item(),
        "median_query": sizes.median().item(),
        "median_row": row_sizes.median().item(),
        "lower_half": gradient_shares(sizes).lower_half,
        "follows": (output.var(dim=-2).mean() / output.square().mean()).item(),
    }


def expectation(measure: str, divisor: str, head_dims: Sequence[int]) -> dict[int, float]:
    """Return what theory says of a measure at every d_k."""
    return {head_dim: _expected(head_dim ** POWERS[divisor], head_dim)[measure] for head_dim in head_dims}


def _expected(scale: float, head_dim: int) -> dict[str, float]:
    row = expected_row(scale * math.sqrt(head_dim), KEYS, head_dim)
    return {
        "variance": scale**2 * head_dim,
        "entropy_ratio": row.entropy / math.log(KEYS),
        "jacobian_trace": row.jacobian_trace,
        "passed": row.jacobian_norm2,
    }


def conclude(outcomes: Outcomes) -> Conclusion:
    """Compare each divisor with theory, and say what is lost without one and with d_k."""
    along, shapes = (outcomes.where(part=part) for part in (ALONG, SHAPES))
    head_dims, curves = along.values("head_dim"), len(RULES) * len(TITLES)
    checks = [
        along.check(f"{NAMES[divisor]}, {title} matches theory", measure,
                    expectation(measure, divisor, head_dims), "head_dim", curves, divisor=divisor)
        for divisor in RULES for measure, title in TITLES.items()
    ]  # fmt: skip
    text = " ".join([
        f"At d_k = {head_dims[-1]} over {KEYS} keys: "
        + "; ".join(_state(along.where(divisor=divisor, head_dim=head_dims[-1]), divisor) for divisor in RULES) + ".",
        _on_gradients(shapes), tally(checks),
    ])  # fmt: skip
    table = along.table(
        f"Three divisors, {KEYS} keys", {"divisor": "divisor", "head_dim": "d_k"},
        {"variance": "variance", "entropy_ratio": "entropy (share of max)", "jacobian_trace": "1 − Σp²",
         "follows": "output variance due to query", "query_gradient": "gradient on q", "median_query": "median query"},
    )  # fmt: skip
    return Conclusion(text, tuple(checks), (_gradient_table(shapes), table), _plots(along))


def _state(own: Outcomes, divisor: str) -> str:
    entropy, follows = own.band("entropy_ratio").mean, own.band("follows").mean
    return f"{NAMES[divisor]}, entropy is {percent(entropy)} of its maximum and {percent(follows)} of the output " \
           "variance is due to the query"  # fmt: skip


def without_over_with(cells: Mapping[str, Sequence[Outcome]]) -> dict[str, list[float]]:
    """Return, seed by seed, gradients without a divisor over those with √d_k, and both shares of the lower half."""
    pairs = list(zip(cells["none"], cells["√d_k"], strict=True))
    return {
        "median_row": [raw["median_row"] / scaled["median_row"] for raw, scaled in pairs],
        "median_query": [raw["median_query"] / scaled["median_query"] for raw, scaled in pairs],
        "lower_half": [raw["lower_half"] for raw, _ in pairs],
        "lower_half_scaled": [scaled["lower_half"] for _, scaled in pairs],
    }


def _compared(shapes: Outcomes, head_dim: int, keys: int) -> dict[str, list[float]]:
    at = shapes.where(head_dim=head_dim, keys=keys)
    return without_over_with({each: [found for _, found in at.where(divisor=each)] for each in ("none", "√d_k")})


def _on_gradients(shapes: Outcomes) -> str:
    medians = {shape: band(_compared(shapes, *shape)["median_query"]).mean for shape in KINDS}
    larger = [shape for shape, times in medians.items() if times > 1]
    halves = [band(_compared(shapes, *shape)["lower_half"]).mean for shape in KINDS]
    return (
        f"Without a divisor the gradient on the median query is larger for {len(larger)} of {len(KINDS)} shapes, and "
        f"the half of the queries that receives least has at most {percent(max(halves))} of it."
    )


def _gradient_table(shapes: Outcomes) -> Table:
    rows = []
    for shape in KINDS:
        row, query, half, scaled = map(band, _compared(shapes, *shape).values())
        numbers = (row.mean, row.margin, query.mean, query.margin, percent(half.mean), percent(scaled.mean))
        rows.append((*shape, *numbers))
    columns = ("d_k", "keys", "median row's scores", "±", "median query", "±", "lower half's share", "with √d_k")
    return Table("Gradient without a divisor, in multiples of that with √d_k", columns, tuple(rows))


def _plots(along: Outcomes) -> tuple[Plot, ...]:
    head_dims = along.values("head_dim")

    def curves(measure: str) -> tuple[Curve, ...]:
        def theory(divisor: str, head_dim: int) -> float:
            return expectation(measure, divisor, head_dims)[head_dim]

        return along.curves("head_dim", measure, "divisor", theory=theory if measure in TITLES else None)

    return (
        Plot("Variance of the scores", "d_k", "variance", curves("variance"),
             "Level: softmax behaves the same at every d_k.", log_x=True, log_y=True),
        Plot("Entropy", "d_k", "entropy / ln n", curves("entropy_ratio"),
             "1: all keys have the same weight. 0: one key has all of it.", log_x=True),
        Plot("Output variance due to the query", "d_k", "share", curves("follows"),
             "Near 0 every query gets the same average.", log_x=True, log_y=True),
        Plot("Gradient on the median query", "d_k", "median", curves("median_query"),
             "Without a divisor it grows with d_k at first, and falls when d_k is very large.", log_x=True, log_y=True),
    )  # fmt: skip


EXPERIMENT = Experiment("divisors", "No divisor, √d_k or d_k: what does each do, and why not d_k?", grid, run,
                        conclude, seeds=16, quick_seeds=8, version=2, core_minutes=0.2)  # fmt: skip
