"""No divisor, √d_k or d_k: variance, entropy, output and gradients as d_k grows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from attnscale.lab.experiment import Conclusion, Curve, Experiment, Outcome, Plot, Settings, Table, product
from attnscale.lab.outcomes import Band, Outcomes, band, percent, tally
from attnscale.lab.training import gradient_shares
from attnscale.measure import score_stats
from attnscale.operator import attention
from attnscale.rules import get_rule
from attnscale.theory import expected_row

TABLES, ROWS, KEYS, VALUE_DIM = 8, 64, 256, 64
RULES = {"none": "unscaled", "√d_k": "inverse_sqrt", "d_k": "inverse_dim"}
POWERS = {"none": 0.0, "√d_k": -0.5, "d_k": -1.0}  # powers of d_k that multiply q·k
NAMES = {"none": "without a divisor", "√d_k": "divided by √d_k", "d_k": "divided by d_k"}
TITLES = {"variance": "Var(scores)", "entropy_ratio": "entropy", "jacobian_trace": "1 − Σp²",
          "passed": "‖diag(p) − ppᵀ‖²"}  # fmt: skip
ALONG, SHAPES = "along d_k", "shapes"
KINDS = ((24, 64), (64, 64), (64, 1024), (256, 256), (512, 64))  # d_k and keys whose gradients are compared


def grid(quick: bool) -> Sequence[Settings]:
    """List every divisor at every d_k, and the shapes whose gradients are compared."""
    head_dims = [4, 16, 64, 256] if quick else [4, 16, 64, 256, 1024, 4096]
    cells = product(part=ALONG, divisor=RULES, head_dim=head_dims, keys=KEYS)
    for head_dim, keys in KINDS:
        cells += product(part=SHAPES, divisor=["none", "√d_k"], head_dim=head_dim, keys=keys)
    return cells


def run(part: str, divisor: str, head_dim: int, keys: int, seed: int) -> Outcome:
    """Measure attention over unit-variance q, k and v, and the gradient of a random loss on scores and queries."""
    rule = get_rule(RULES[divisor])
    query, key = torch.randn(TABLES, ROWS, head_dim), torch.randn(TABLES, keys, head_dim)
    value, upstream = torch.randn(TABLES, keys, VALUE_DIM), torch.randn(TABLES, ROWS, VALUE_DIM)
    stats = score_stats(query, key, scale=rule)
    query.requires_grad_()
    added = torch.zeros(TABLES, ROWS, keys, requires_grad=True)  # added to the scores, so it has their gradient
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


def expected(measure: str, divisor: str, head_dim: int) -> float:
    """Return the theoretical value of a measure."""
    scale = head_dim ** POWERS[divisor]
    row = expected_row(scale * math.sqrt(head_dim), KEYS, head_dim)
    measures: dict[str, float] = {
        "variance": scale**2 * head_dim,
        "entropy_ratio": row.entropy / math.log(KEYS),
        "jacobian_trace": row.jacobian_trace,
        "passed": row.jacobian_norm2,
    }
    return measures[measure]


def conclude(outcomes: Outcomes) -> Conclusion:
    """Compare each divisor with theory, and describe the losses without a divisor and with d_k."""
    along, shapes = (outcomes.where(part=part) for part in (ALONG, SHAPES))
    largest, curves = along.values("head_dim")[-1], len(RULES) * len(TITLES)
    gradients = [without_scale(shapes.where(head_dim=head_dim, keys=keys)) for head_dim, keys in KINDS]
    checks = [
        along.check(f"{NAMES[divisor]}, {title} matches theory", measure, partial(expected, measure, divisor),
                    "head_dim", curves, divisor=divisor)
        for divisor in RULES for measure, title in TITLES.items()
    ]  # fmt: skip
    text = " ".join([
        f"At d_k = {largest} over {KEYS} keys: "
        + "; ".join(_state(along.where(divisor=divisor, head_dim=largest), divisor) for divisor in RULES) + ".",
        _on_gradients(gradients), tally(checks),
    ])  # fmt: skip
    table = along.table(
        f"Three divisors, {KEYS} keys", {"divisor": "divisor", "head_dim": "d_k"},
        {"variance": "variance", "entropy_ratio": "entropy (share of max)", "jacobian_trace": "1 − Σp²",
         "follows": "output variance due to query", "query_gradient": "gradient on q", "median_query": "median query"},
    )  # fmt: skip
    return Conclusion(text, checks, [_gradient_table(gradients), table], _plots(along))


def _state(own: Outcomes, divisor: str) -> str:
    entropy, follows = own.band("entropy_ratio").mean, own.band("follows").mean
    return f"{NAMES[divisor]}, entropy is {percent(entropy)} of its maximum and {percent(follows)} of the output " \
           "variance is due to the query"  # fmt: skip


@dataclass(frozen=True)
class WithoutScale:
    """Gradients without a divisor over those with √d_k, and the share of the lower half of the queries."""

    on_scores: Band  # median row
    on_query: Band  # median query
    lower_half: Band
    lower_half_scaled: Band


def without_scale(at: Outcomes) -> WithoutScale:
    """Compare the gradients of one shape without a divisor and with √d_k, seed by seed."""
    raw, scaled = (at.where(divisor=divisor) for divisor in ("none", "√d_k"))

    def times(measure: str) -> Band:
        return band(one / other for one, other in zip(raw.samples(measure), scaled.samples(measure), strict=True))

    return WithoutScale(times("median_row"), times("median_query"), raw.band("lower_half"), scaled.band("lower_half"))


def _on_gradients(found: Sequence[WithoutScale]) -> str:
    larger = sum(each.on_query.mean > 1 for each in found)
    most = max(each.lower_half.mean for each in found)
    return (
        f"Without a divisor the gradient on the median query is larger for {larger} of {len(KINDS)} shapes, and "
        f"the half of the queries that receives least has at most {percent(most)} of it."
    )


def _gradient_table(found: Sequence[WithoutScale]) -> Table:
    rows = []
    for shape, each in zip(KINDS, found, strict=True):
        shares = percent(each.lower_half.mean), percent(each.lower_half_scaled.mean)
        rows.append((*shape, *each.on_scores.columns, *each.on_query.columns, *shares))
    columns = ("d_k", "keys", "median row's scores", "±", "median query", "±", "lower half's share", "with √d_k")
    return Table("Gradient without a divisor, in multiples of that with √d_k", columns, tuple(rows))


def _plots(along: Outcomes) -> list[Plot]:
    def curves(measure: str) -> tuple[Curve, ...]:
        theory = partial(expected, measure) if measure in TITLES else None
        return along.curves("head_dim", measure, "divisor", theory=theory)

    return [
        Plot("Variance of the scores", "d_k", "variance", curves("variance"),
             "Level: softmax behaves the same at every d_k.", log_x=True, log_y=True),
        Plot("Entropy", "d_k", "entropy / ln n", curves("entropy_ratio"),
             "1: all keys have the same weight. 0: one key has all of it.", log_x=True),
        Plot("Output variance due to the query", "d_k", "share", curves("follows"),
             "Near 0 every query gets the same average.", log_x=True, log_y=True),
        Plot("Gradient on the median query", "d_k", "median", curves("median_query"),
             "Without a divisor it grows with d_k at first, and falls when d_k is very large.", log_x=True, log_y=True),
    ]  # fmt: skip


EXPERIMENT = Experiment("divisors", "No divisor, √d_k or d_k: what does each do, and why not d_k?", grid, run,
                        conclude, seeds=16, quick_seeds=8, version=2, core_minutes=0.2)  # fmt: skip
