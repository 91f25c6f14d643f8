"""Gradient through softmax, and the gradient that reaches queries and W_q before training."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attnscale.lab.experiment import (
    Check,
    Conclusion,
    Curve,
    Experiment,
    Heatmap,
    Outcome,
    Plot,
    Settings,
    Table,
    product,
)
from attnscale.lab.outcomes import Outcomes, column, percent, tally
from attnscale.lab.tasks import Characters
from attnscale.lab.training import NAMES, SCALES, SHARES, attentions_of, query_shares
from attnscale.models import CausalTransformer
from attnscale.operator import attention_weights
from attnscale.reference import Array, softmax, softmax_jacobian
from attnscale.watching import watch

NAMED, MODEL = "named rows", "model"
TEXTBOOK = [9.2, -3.1, 8.8, -5.4, 1.2]  # scores of a textbook at d_k = 64, which it divides by 8
UNIFORM, DIVIDED, UNDIVIDED, ONE_HOT = "uniform", "textbook's scores ÷ 8", "textbook's scores", "one-hot"
WEIGHED = "weights 0.3, 0.3, 0.2, 0.2"
ROWS_BY_NAME = {
    UNIFORM: [0.0] * 5,
    DIVIDED: [score / 8 for score in TEXTBOOK],
    UNDIVIDED: TEXTBOOK,
    ONE_HOT: [25.0, -20.0, 3.0, -15.0, 0.0],
    WEIGHED: [math.log(weight) for weight in (0.3, 0.3, 0.2, 0.2)],
}
PRINTED = [0.21, 0.21, 0.16, 0.16]  # by the textbook, for WEIGHED
D_MODEL, HEADS, BATCH, LENGTH = 64, 2, 8, 64
BASE = "1/√d_k"


def grid(quick: bool) -> Sequence[Settings]:
    """List the named rows, and models of every depth, d_k and scale."""
    depths, head_dims = ([4], [8, 128]) if quick else ([2, 4, 8], [8, 32, 128, 256])
    return [{"part": NAMED}, *product(part=MODEL, layers=depths, head_dim=head_dims, scale=SCALES)]


def run(part: str, seed: int, layers: int = 1, head_dim: int = 2, scale: str = BASE) -> Outcome:
    """Compute Jacobians of rows by automatic differentiation, or gradients of a fresh model on a batch of text."""
    if part == NAMED:
        return {
            name: torch.autograd.functional.jacobian(softmax_of, torch.tensor(scores, dtype=torch.float64)).tolist()
            for name, scores in ROWS_BY_NAME.items()
        }
    return _model(layers, head_dim, scale)


def softmax_of(scores: Tensor) -> Tensor:
    """Return attention's weights for a row of scores, passed as a bias on scores of zero."""
    return attention_weights(scores.new_zeros(1, 1), scores.new_zeros(len(scores), 1), attn_mask=scores[None])[0]


def _model(layers: int, head_dim: int, scale: str) -> Outcome:
    model = CausalTransformer(Characters.vocabulary, D_MODEL, layers, HEADS, head_dim, scale=SCALES[scale])
    batch = Characters(LENGTH).batch(BATCH, torch.default_generator)
    with watch(model) as seen:
        loss = batch.loss(model)
    weights = [attention.query.weight for attention in attentions_of(model)]
    norms = [gradient.norm().item() for gradient in torch.autograd.grad(loss, weights)]
    received = query_shares(model, batch)
    return {
        "first_query": norms[0],
        "backwards": norms[0] / norms[-1],
        "jacobian_trace": float(np.mean([layer.stats.jacobian_trace.mean().item() for layer in seen.layers.values()])),
        "on_queries": received.root_mean_square,
        "shares": list(received.curve),
        "lower_half": received.lower_half,
    }


def conclude(outcomes: Outcomes) -> Conclusion:
    """Describe the gradient through softmax, and its size and evenness without a scale."""
    named, models = (outcomes.where(part=part) for part in (NAMED, MODEL))
    jacobians = {name: np.array(found) for name, found in named.cells[0][1].items()}
    traces = {name: float(np.trace(jacobian)) for name, jacobian in jacobians.items()}
    deep = models.where(layers=models.values("layers")[-1])
    checks = _checks(jacobians)
    text = " ".join([
        f"The trace of the softmax Jacobian over 5 keys is {traces[UNIFORM]:.2f} for a uniform row, "
        f"{traces[DIVIDED]:.2f} for a textbook's scores divided by 8, {traces[UNDIVIDED]:.2f} for these scores as they "
        f"are, and {traces[ONE_HOT]:.2g} for a one-hot row.",
        _on_queries(deep), tally(checks),
    ])  # fmt: skip
    rows = tuple((name, traces[name], float(np.linalg.norm(jacobians[name]))) for name in ROWS_BY_NAME)
    tables = [
        Table("Softmax Jacobians", ("row", "trace 1 − Σp²", "Frobenius norm"), rows),
        models.table(
            "Gradient norms before training", {"layers": "layers", "head_dim": "d_k", "scale": "scale"},
            {"first_query": "first W_q", "backwards": "first / last W_q",
             "jacobian_trace": "1 − Σp²", "on_queries": "on first queries", "lower_half": "share of lower half"},
        ),
    ]  # fmt: skip
    return Conclusion(text, checks, tables, [*_maps(jacobians), *_plots(deep)])


def _checks(jacobians: dict[str, Array]) -> list[Check]:
    closed = {name: softmax_jacobian(softmax(scores)) for name, scores in ROWS_BY_NAME.items()}
    off = max(float(abs(jacobians[name] - closed[name]).max()) for name in closed)
    diagonal = np.diagonal(jacobians[WEIGHED])
    return [
        Check("attention's Jacobian by automatic differentiation is diag(p) − ppᵀ", off < 1e-9,
              f"{len(closed)} rows, largest difference {off:.1g}"),
        Check("weights 0.3, 0.3, 0.2, 0.2 have the derivatives 0.21, 0.21, 0.16, 0.16, as a textbook prints",
              bool(np.allclose(diagonal, PRINTED, atol=0.005)), ", ".join(f"{own:.3f}" for own in diagonal)),
    ]  # fmt: skip


def _on_queries(deep: Outcomes) -> str:
    largest = deep.values("head_dim")[-1]
    (first, first_scaled), (size, size_scaled), (half, half_scaled) = (
        [deep.band(measure, head_dim=largest, scale=scale) for scale in ("none", BASE)]
        for measure in ("first_query", "on_queries", "lower_half")
    )
    times, first_times = size.mean / size_scaled.mean, first.mean / first_scaled.mean
    amount = "more" if size.low > size_scaled.high else "less" if size.high < size_scaled.low else "about as much"
    shared = "and is shared less evenly" if half.high < half_scaled.low else "and is shared as evenly"
    return (
        f"Without a scale {amount} gradient reaches the first layer's queries at d_k = {largest} before training "
        f"({times:.2g} times in root mean square; on its W_q {first_times:.2g} times) {shared}: the half that receives "
        f"least has {percent(half.mean)} of it, with {BASE} {percent(half_scaled.mean)}."
    )


def _maps(jacobians: dict[str, Array]) -> list[Heatmap]:
    keys, maps = tuple(range(1, 6)), []
    for name in ROWS_BY_NAME:
        if name != WEIGHED:  # which has four keys
            notice = f"Trace {np.trace(jacobians[name]):.2g}: how far the weights move with a score."
            values = tuple(map(column, jacobians[name]))
            maps.append(
                Heatmap(f"Jacobian: {name}", "score of key", "weight of key", keys, keys, values, notice, -0.25, 0.25)
            )
    return maps


def _plots(deep: Outcomes) -> list[Plot]:
    depth, largest = deep.values("layers")[-1], deep.values("head_dim")[-1]
    first, halves = (
        deep.curves("head_dim", measure, "scale", names=NAMES) for measure in ("first_query", "lower_half")
    )
    shares = [deep.series(NAMES[scale], SHARES, "shares", scale=scale, head_dim=largest) for scale in SCALES]
    return [
        Plot(f"Gradient on the first W_q, {depth} layers", "d_k", "norm", first,
             "Level: d_k does not matter.", log_x=True, log_y=True),
        Plot(f"Share of the gradient for the lower half of the first layer's queries, {depth} layers", "d_k", "share",
             halves, "0.5: every query receives the same. Near 0: half receive almost nothing.", log_x=True),
        Plot(f"Shares of the gradient, d_k = {largest}, {depth} layers",
             "share of queries, smallest gradient first", "share of the gradient",
             (*shares, Curve("all the same", SHARES, SHARES, is_theory=True)),
             "Straight: every query receives the same. Flat, then steep: a few queries receive nearly all."),
    ]  # fmt: skip


EXPERIMENT = Experiment("gradients", "How much gradient passes softmax, and how much reaches queries and W_q?",
                        grid, run, conclude, seeds=16, quick_seeds=6, version=5, core_minutes=3.2)  # fmt: skip
