"""Gradient through softmax, and the gradient that reaches queries and W_q before training."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attnscale.lab.experiment import Conclusion, Experiment, Outcome, Settings
from attnscale.lab.outcomes import Outcomes, percent, tally, times
from attnscale.lab.result import Check, Curve, Heatmap, Plot, Table, column, expected_curve
from attnscale.lab.tasks import Characters
from attnscale.lab.training import SCALES, attentions_of, mean_shares, query_shares, share_points
from attnscale.models import CausalTransformer
from attnscale.operator import attention_weights
from attnscale.reference import row_statistics, softmax_jacobian
from attnscale.theory import expected_row
from attnscale.watching import watch

NAMED, DRAWN, MODEL = "named rows", "Gaussian rows", "model"
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
PRINTED = [0.21, 0.21, 0.16, 0.16]  # by the textbook, for the last of them
ROWS, KEYS = 512, 32
D_MODEL, HEADS, BATCH, LENGTH = 64, 2, 8, 64
BASE = "1/√d_k"
NAMES = {"none": "without a scale", BASE: f"with {BASE}", "1/d_k": "with 1/d_k"}


def grid(quick: bool) -> Sequence[Settings]:
    """List the named rows, Gaussian rows of every spread, and models of every depth, d_k and scale."""
    spreads = [0.25, 1.0, 4.0, 8.0] if quick else [0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0]
    depths, head_dims = ([4], [8, 128]) if quick else ([2, 4, 8], [8, 32, 128, 256])
    drawn: list[Settings] = [{"part": DRAWN, "spread": spread} for spread in spreads]
    models: list[Settings] = [
        {"part": MODEL, "layers": layers, "head_dim": head_dim, "scale": scale}
        for layers in depths for head_dim in head_dims for scale in SCALES
    ]  # fmt: skip
    return [{"part": NAMED}, *drawn, *models]


def run(part: str, seed: int, spread: float = 1.0, layers: int = 1, head_dim: int = 2, scale: str = BASE) -> Outcome:
    """Compute Jacobians of rows by automatic differentiation, or gradients of a fresh model on a batch of text."""
    if part == NAMED:
        return {name: jacobian(torch.tensor(scores))[0].tolist() for name, scores in ROWS_BY_NAME.items()}
    return _drawn_rows(spread) if part == DRAWN else _model(layers, head_dim, scale)


def jacobian(scores: Tensor) -> Tensor:
    """Return ∂weights/∂scores of attention, (rows, keys, keys), by automatic differentiation."""
    scores = torch.atleast_2d(scores).double().detach().requires_grad_()
    weights = softmax_of(scores)
    return torch.stack([torch.autograd.grad(own.sum(), scores, retain_graph=True)[0] for own in weights.unbind(-1)], -2)


def softmax_of(scores: Tensor) -> Tensor:
    """Return attention's weights for these scores, which are given as a bias on scores of zero."""
    rows, keys = scores.shape
    return attention_weights(scores.new_zeros(rows, 1), scores.new_zeros(keys, 1), attn_mask=scores)


def _drawn_rows(spread: float) -> Outcome:
    scores = spread * torch.randn(ROWS, KEYS, dtype=torch.float64)
    found = jacobian(scores)
    rows = row_statistics(scores.numpy())
    trace, norm2 = found.diagonal(dim1=-2, dim2=-1).sum(-1), found.square().sum((-2, -1))
    closed = softmax_jacobian(softmax_of(scores).numpy())
    return {
        "trace": trace.mean().item(),
        "norm2": norm2.mean().item(),
        "off_jacobian": float(np.abs(found.numpy() - closed).max()),
        "off_trace": float(np.abs(trace.numpy() - rows.jacobian_trace).max()),
        "off_norm2": float(np.abs(norm2.numpy() - rows.jacobian_norm2).max()),
    }


def _model(layers: int, head_dim: int, scale: str) -> Outcome:
    model = CausalTransformer(Characters.vocabulary, D_MODEL, layers, HEADS, head_dim, scale=SCALES[scale])
    batch = Characters(LENGTH).batch(BATCH, torch.default_generator)
    with watch(model) as seen:
        loss = batch.loss(model)
    weights = [attention.query.weight for attention in attentions_of(model)]
    norms = [gradient.norm().item() for gradient in torch.autograd.grad(loss, weights)]
    received = mean_shares(query_shares(model, batch))
    return {
        "first_query": norms[0],
        "backwards": norms[0] / norms[-1],
        "jacobian_trace": float(np.mean([layer.stats.jacobian_trace.mean().item() for layer in seen.layers.values()])),
        "on_queries": received.root_mean_square,
        "shares": list(received.curve),
        "lower_half": received.lower_half,
    }


def conclude(outcomes: Outcomes) -> Conclusion:
    """Say what passes softmax, and how much gradient arrives without a scale and how evenly."""
    named, drawn, models = (outcomes.where(part=part) for part in (NAMED, DRAWN, MODEL))
    jacobians = named.cells[0][1]
    traces = {name: float(np.trace(jacobians[name])) for name in ROWS_BY_NAME}
    deep = models.where(layers=models.values("layers")[-1])
    checks = tuple(_row_checks(jacobians, drawn))
    text = " ".join([
        f"The trace of the softmax Jacobian over 5 keys is {traces[UNIFORM]:.2f} for a uniform row, "
        f"{traces[DIVIDED]:.2f} for a textbook's scores divided by 8, {traces[UNDIVIDED]:.2f} for these scores as they "
        f"are, and {traces[ONE_HOT]:.2g} for a one-hot row.",
        _on_queries(deep), tally(checks),
    ])  # fmt: skip
    return Conclusion(text, checks, _tables(traces, jacobians, models), _plots(jacobians, drawn, deep))


def _row_checks(jacobians: Outcome, drawn: Outcomes) -> list[Check]:
    expected = {spread: expected_row(spread, KEYS) for spread in drawn.values("spread")}
    diagonal = np.diagonal(jacobians[WEIGHED])

    def exact(statement: str, measure: str) -> Check:
        off = max(found[measure] for _, found in drawn)
        return Check(statement, off < 1e-9, f"{len(drawn) * ROWS} rows, largest difference {off:.1g}")

    return [
        exact("attention's Jacobian by automatic differentiation is diag(p) − ppᵀ", "off_jacobian"),
        exact("its trace is 1 − Σp²", "off_trace"),
        exact("its squared Frobenius norm is Σp² − 2Σp³ + (Σp²)²", "off_norm2"),
        drawn.check(f"over {KEYS} Gaussian scores the trace matches theory", "trace",
                    {spread: row.jacobian_trace for spread, row in expected.items()}, "spread", 2),
        drawn.check(f"over {KEYS} Gaussian scores the squared norm matches theory", "norm2",
                    {spread: row.jacobian_norm2 for spread, row in expected.items()}, "spread", 2),
        Check("weights 0.3, 0.3, 0.2, 0.2 have the derivatives 0.21, 0.21, 0.16, 0.16, as a textbook prints",
              bool(np.allclose(diagonal, PRINTED, atol=0.005)), ", ".join(f"{own:.3f}" for own in diagonal)),
    ]  # fmt: skip


def _on_queries(deep: Outcomes) -> str:
    largest = deep.values("head_dim")[-1]
    first, size = (
        deep.ratio(measure, {"scale": "none"}, {"scale": BASE}, head_dim=largest)
        for measure in ("first_query", "on_queries")
    )
    raw, scaled = (deep.band("lower_half", head_dim=largest, scale=scale) for scale in ("none", BASE))
    amount = "more" if size.low > 1 else "less" if size.high < 1 else "about as much"
    shared = "and is shared less evenly" if raw.high < scaled.low else "and is shared as evenly"
    return (
        f"Without a scale {amount} gradient reaches the queries at d_k = {largest} before training ({times(size)} in "
        f"root mean square; on the first W_q {times(first)}) {shared}: the half that receives least has "
        f"{percent(raw.mean)} of it, with {BASE} {percent(scaled.mean)}."
    )


def _tables(traces: dict[str, float], jacobians: Outcome, models: Outcomes) -> tuple[Table, ...]:
    rows = tuple((name, trace, float(np.linalg.norm(jacobians[name]))) for name, trace in traces.items())
    return (
        Table("Softmax Jacobians", ("row", "trace 1 − Σp²", "Frobenius norm"), rows),
        models.table(
            "Gradient norms before training", {"layers": "layers", "head_dim": "d_k", "scale": "scale"},
            {"first_query": "first W_q", "backwards": "first / last W_q",
             "jacobian_trace": "1 − Σp²", "on_queries": "on queries", "lower_half": "share of lower half"},
        ),
    )  # fmt: skip


def _plots(jacobians: Outcome, drawn: Outcomes, deep: Outcomes) -> tuple[Plot | Heatmap, ...]:
    spreads, depth, largest = drawn.values("spread"), deep.values("layers")[-1], deep.values("head_dim")[-1]
    theory = [expected_row(spread, KEYS) for spread in spreads]
    maps = [
        Heatmap(f"Jacobian: {name}", "score of key", "weight of key", tuple(range(1, 6)), tuple(range(1, 6)),
                tuple(column(row) for row in jacobians[name]),
                f"Trace {np.trace(jacobians[name]):.2g}: how far the weights move with a score.", -0.25, 0.25)
        for name in ROWS_BY_NAME if len(jacobians[name]) == 5
    ]  # fmt: skip

    def against_dim(measure: str) -> tuple[Curve, ...]:
        return deep.curves("head_dim", measure, "scale", names=NAMES)

    even = tuple(share_points())
    shares = [deep.series(NAMES[scale], even, "shares", scale=scale, head_dim=largest) for scale in SCALES]
    return (
        *maps,
        Plot(f"Softmax Jacobian over {KEYS} Gaussian scores", "spread σ of the scores", "mean over rows",
             (drawn.curve("trace", "spread", "trace"),
              expected_curve("trace", spreads, [row.jacobian_trace for row in theory]),
              drawn.curve("squared norm", "spread", "norm2"),
              expected_curve("squared norm", spreads, [row.jacobian_norm2 for row in theory])),
             "The norm is largest where a few keys compete.", log_x=True),
        Plot(f"Gradient on the first W_q, {depth} layers", "d_k", "norm", against_dim("first_query"),
             "Level: d_k does not matter.", log_x=True, log_y=True),
        Plot(f"Share of the gradient for the lower half of the queries, {depth} layers", "d_k", "share",
             against_dim("lower_half"), "0.5: every query receives the same. Near 0: half receive almost nothing.",
             log_x=True),
        Plot(f"Shares of the gradient, d_k = {largest}, {depth} layers",
             "share of queries, smallest gradient first", "share of the gradient",
             (*shares, Curve("all the same", even, even, is_theory=True)),
             "Straight: every query receives the same. Flat, then steep: a few queries receive nearly all."),
    )  # fmt: skip


EXPERIMENT = Experiment("gradients", "How much gradient passes softmax, and how much reaches queries and W_q?",
                        grid, run, conclude, seeds=16, quick_seeds=6, version=4, core_minutes=3.3)  # fmt: skip
