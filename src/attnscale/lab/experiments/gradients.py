"""What the softmax lets through, and what of it reaches W_q and W_k when training starts."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attnscale.lab.cell import Outcome, Settings
from attnscale.lab.experiment import Conclusion, Experiment
from attnscale.lab.outcomes import Outcomes
from attnscale.lab.result import Check, Curve, Heatmap, Plot, Table, column
from attnscale.lab.shares import along, mean_shares, query_shares
from attnscale.lab.tasks import Characters
from attnscale.lab.wording import percent, ranging, tally, times
from attnscale.models import CausalTransformer
from attnscale.models.transformer import CausalSelfAttention
from attnscale.operator import attention_weights
from attnscale.reference import row_statistics, softmax_jacobian
from attnscale.theory import expected_row
from attnscale.watching import watch

NAMED, DRAWN, MODEL = "named rows", "Gaussian rows", "model"
TEXTBOOK = [9.2, -3.1, 8.8, -5.4, 1.2]  # a textbook's scores at d_k = 64, which it divides by 8
UNIFORM, DIVIDED, UNDIVIDED, AHEAD = "uniform", "textbook's scores ÷ 8", "textbook's scores", "one far ahead"
WEIGHED = "weights 0.3, 0.3, 0.2, 0.2"
ROWS_BY_NAME = {
    UNIFORM: [0.0] * 5,
    DIVIDED: [score / 8 for score in TEXTBOOK],
    UNDIVIDED: TEXTBOOK,
    AHEAD: [25.0, -20.0, 3.0, -15.0, 0.0],
    WEIGHED: [math.log(weight) for weight in (0.3, 0.3, 0.2, 0.2)],
}
PRINTED = [0.21, 0.21, 0.16, 0.16]  # what the textbook says of the last of them
ROWS, KEYS = 512, 32
SCALES = {"none": "unscaled", "1/√d_k": "inverse_sqrt", "1/d_k": "inverse_dim"}
D_MODEL, HEADS, BATCH, LENGTH = 64, 2, 8, 64


def grid(quick: bool) -> Sequence[Settings]:
    """Rows by name and by spread; models of every depth, d_k and scale."""
    spreads = [0.25, 1.0, 4.0, 8.0] if quick else [0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0]
    depths, head_dims = ([4], [8, 128]) if quick else ([2, 4, 8], [8, 32, 128, 256])
    named: list[Settings] = [{"part": NAMED}]
    drawn: list[Settings] = [{"part": DRAWN, "spread": spread} for spread in spreads]
    models: list[Settings] = [
        {"part": MODEL, "layers": layers, "head_dim": head_dim, "scale": scale}
        for layers in depths for head_dim in head_dims for scale in SCALES
    ]  # fmt: skip
    return named + drawn + models


def run(
    part: str, seed: int, spread: float = 1.0, layers: int = 1, head_dim: int = 2, scale: str = "1/√d_k"
) -> Outcome:
    """Jacobians of rows, by automatic differentiation; or gradients of a model on a batch of text."""
    if part == NAMED:
        return {name: jacobian(torch.tensor(scores))[0].tolist() for name, scores in ROWS_BY_NAME.items()}
    if part == DRAWN:
        return _drawn_rows(spread)
    return _model(layers, head_dim, SCALES[scale])


def jacobian(scores: Tensor) -> Tensor:
    """∂weights/∂scores of attention itself, by automatic differentiation: (rows, keys, keys)."""
    scores = torch.atleast_2d(scores).double().detach().requires_grad_()
    weights = softmax_of(scores)
    return torch.stack([torch.autograd.grad(own.sum(), scores, retain_graph=True)[0] for own in weights.unbind(-1)], -2)


def softmax_of(scores: Tensor) -> Tensor:
    """What attention makes of these scores: they are all of a bias that is added to none."""
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
        "off_trace": float(np.abs(trace.numpy() - rows.gradient_gain).max()),
        "off_norm2": float(np.abs(norm2.numpy() - rows.jacobian_norm2).max()),
    }


def _model(layers: int, head_dim: int, scale: str) -> Outcome:
    model = CausalTransformer(Characters.vocabulary, D_MODEL, layers, HEADS, head_dim, scale=scale)
    attentions = [module for module in model.modules() if isinstance(module, CausalSelfAttention)]
    batch = Characters(LENGTH).batch(BATCH, torch.default_generator)
    with watch(model) as seen:
        loss = batch.loss(model)
    weights = [matrix.weight for attention in attentions for matrix in (attention.query, attention.key)]
    on_weights = torch.autograd.grad(loss, weights)
    norms = [gradient.norm().item() for gradient in on_weights]
    pulls = [(weight * gradient).sum().item() for weight, gradient in zip(weights, on_weights, strict=True)]
    on_queries = query_shares(model, batch)
    received = mean_shares(on_queries)
    reach = [weight.norm().item() * norm for weight, norm in zip(weights, norms, strict=True)]
    return {
        "query": norms[::2],
        "key": norms[1::2],
        "first_query": norms[0],
        "first_key": norms[1],
        "backwards": norms[0] / norms[-2],
        "key_over_query": float(np.mean(norms[1::2]) / np.mean(norms[::2])),
        "gradient_gain": float(np.mean([layer.stats.gradient_gain.mean().item() for layer in seen.layers.values()])),
        "evenness": float(np.mean([layer.evenness for layer in on_queries])),
        "on_queries": received.root_mean_square,
        "shares": list(received.curve),
        "quiet_half": received.quiet_half,
        "loud_tenth": received.loud_tenth,
        "imbalance": max(abs(q - k) / most for q, k, most in zip(pulls[::2], pulls[1::2], reach[::2], strict=True)),
    }


def conclude(outcomes: Outcomes) -> Conclusion:
    """What a peaked row lets through, and whether less of it arrives without a scale."""
    named, drawn, models = (outcomes.where(part=part) for part in (NAMED, DRAWN, MODEL))
    jacobians = named.cells[0][1]
    checks = [*_row_checks(jacobians, drawn), _balance(models)]
    deepest = models.values("layers")[-1]
    deep = models.where(layers=deepest)
    traces = {name: float(np.trace(jacobians[name])) for name in ROWS_BY_NAME}
    text = (
        f"A uniform row of 5 keys lets a trace of {traces[UNIFORM]:.2f} through its Jacobian, a textbook's scores "
        f"{traces[DIVIDED]:.2f} divided by 8 and {traces[UNDIVIDED]:.2f} as they are, "
        f"and a row with one score far ahead {traces[AHEAD]:.2g}. In models of {deepest} layers, before "
        f"training, the gradient on the first W_q is, beside 1/√d_k, "
        + "; ".join(_against(deep, scale) for scale in ("none", "1/d_k"))
        + ". "
        + _gain(deep) + " "
        + _depth(deep) + " "
        + f"W_k receives {ranging(_both(models), 2)} times what W_q does. " + tally(checks)
    )  # fmt: skip
    return Conclusion(text, tuple(checks), _tables(traces, jacobians, models), _plots(jacobians, drawn, deep))


def _row_checks(jacobians: Outcome, drawn: Outcomes) -> list[Check]:
    spreads = drawn.values("spread")
    off = {
        name: max(found[name] for _, found in drawn) for name in ("off_jacobian", "off_trace", "off_norm2")
    }  # fmt: skip
    diagonal = np.diagonal(jacobians[WEIGHED])
    expected = {spread: expected_row(spread, KEYS) for spread in spreads}

    def exact(statement: str, size: float) -> Check:
        return Check(statement, size < 1e-9, f"{len(drawn) * ROWS} rows, off by at most {size:.1g}")

    return [
        exact("attention's Jacobian by automatic differentiation is diag(p) − ppᵀ", off["off_jacobian"]),
        exact("its trace is 1 − Σp²", off["off_trace"]),
        exact("its squared Frobenius norm is Σp² − 2Σp³ + (Σp²)²", off["off_norm2"]),
        drawn.check(f"over {KEYS} Gaussian scores the trace is its exact expectation", "trace",
                    {spread: row.gradient_gain for spread, row in expected.items()}, "spread", 2),
        drawn.check(f"over {KEYS} Gaussian scores the squared norm is its exact expectation", "norm2",
                    {spread: row.jacobian_norm2 for spread, row in expected.items()}, "spread", 2),
        Check("weights 0.3, 0.3, 0.2, 0.2 have gradients 0.21, 0.21, 0.16, 0.16 of their own, as a textbook prints",
              bool(np.allclose(diagonal, PRINTED, atol=0.005)), ", ".join(f"{own:.3f}" for own in diagonal)),
    ]  # fmt: skip


def _balance(models: Outcomes) -> Check:
    worst = max(found["imbalance"] for _, found in models)
    blocks = sum(len(found["query"]) for _, found in models)
    # W_q times c and W_k over c are the same scores, so the loss cannot prefer one
    return Check("⟨W_q, ∂W_q⟩ = ⟨W_k, ∂W_k⟩ in every block, since only their product counts", worst < 1e-4,
                 f"{blocks} blocks, off by at most {worst:.1g} of ‖W_q‖ ‖∂W_q‖")  # fmt: skip


def _against(models: Outcomes, scale: str) -> str:
    head_dims = models.values("head_dim")
    ratios = [
        models.ratio("first_query", {"scale": scale}, {"scale": "1/√d_k"}, points=len(head_dims), head_dim=head_dim)
        for head_dim in head_dims
    ]
    name = "without a scale" if scale == "none" else f"under {scale}"
    at = ", ".join(f"{times(ratio)} at d_k = {head_dim}" for ratio, head_dim in zip(ratios, head_dims, strict=True))
    return f"{name} {at}"


def _gain(models: Outcomes) -> str:
    largest = models.values("head_dim")[-1]
    (gain, scaled), (even, even_scaled), (quiet, quiet_scaled), (loud, loud_scaled) = (
        [models.band(measure, head_dim=largest, scale=scale) for scale in ("none", "1/√d_k")]
        for measure in ("gradient_gain", "evenness", "quiet_half", "loud_tenth")
    )
    size = models.ratio("on_queries", {"scale": "none"}, {"scale": "1/√d_k"}, head_dim=largest)
    vanishes = models.ratio("first_query", {"scale": "none"}, {"scale": "1/√d_k"}, head_dim=largest).high < 1
    less = even.high < even_scaled.low
    return (
        f"At d_k = {largest} a row without a scale keeps {gain.mean:.2f} of 1 − Σp² (scaled {scaled.mean:.2f}), and "
        + ("what arrives is less in all" if vanishes else "what arrives is not less in all")
        + (", but less even" if less else ", and as even")
        + f": on the queries {times(size)} the root mean square, of which the median query receives {even.mean:.2f}, "
        f"scaled {even_scaled.mean:.2f}; the half of the queries that receives least has {percent(quiet.mean)} of all, "
        f"scaled {percent(quiet_scaled.mean)}, the tenth that receives most {percent(loud.mean)}, scaled "
        f"{percent(loud_scaled.mean)}."
    )


def _depth(models: Outcomes) -> str:
    largest = models.values("head_dim")[-1]
    found = {scale: models.band("backwards", head_dim=largest, scale=scale) for scale in SCALES}
    return (
        "From the last block back to the first it changes by "
        + ", ".join(f"{times(ratio)} ({_named(scale)})" for scale, ratio in found.items())
        + "."
    )


def _named(scale: str) -> str:
    return "no scale" if scale == "none" else scale


def _both(models: Outcomes) -> list[float]:
    return [
        models.band("key_over_query", layers=layers, head_dim=head_dim, scale=scale).mean
        for layers in models.values("layers") for head_dim in models.values("head_dim") for scale in SCALES
    ]  # fmt: skip


def _tables(traces: dict[str, float], jacobians: Outcome, models: Outcomes) -> tuple[Table, ...]:
    rows = tuple((name, trace, float(np.linalg.norm(jacobians[name]))) for name, trace in traces.items())
    measures = ("first_query", "first_key", "backwards", "gradient_gain", "evenness")
    reached = tuple(
        (layers, head_dim, _named(scale),
         *(models.band(name, layers=layers, head_dim=head_dim, scale=scale).mean for name in measures))
        for layers in models.values("layers") for head_dim in models.values("head_dim") for scale in SCALES
    )  # fmt: skip
    columns = ("layers", "d_k", "scale", "first W_q", "first W_k", "first/last", "1 − Σp²", "median/rms")
    return (
        Table("Softmax Jacobians", ("row", "trace 1 − Σp²", "Frobenius norm"), rows),
        Table("Gradient norms when training starts", columns, reached),
    )


def _plots(jacobians: Outcome, drawn: Outcomes, deep: Outcomes) -> tuple[Plot | Heatmap, ...]:
    spreads, head_dims = drawn.values("spread"), deep.values("head_dim")
    largest, depth = head_dims[-1], deep.values("layers")[-1]

    def expected(name: str, of: str) -> Curve:
        theory = [getattr(expected_row(spread, KEYS), of) for spread in spreads]
        return Curve(f"{name}, expected", tuple(spreads), column(theory), is_theory=True)

    maps = [
        Heatmap(f"Jacobian: {name}", "score of key", "weight of key", tuple(range(1, 6)), tuple(range(1, 6)),
                tuple(column(row) for row in jacobians[name]),
                f"Trace {np.trace(jacobians[name]):.2g}: how far the weights move when a score does.", -0.25, 0.25)
        for name in ROWS_BY_NAME if len(jacobians[name]) == 5
    ]  # fmt: skip
    through = Plot(
        f"What {KEYS} Gaussian scores let through", "spread σ of the scores", "expectation over rows",
        (drawn.curve("trace", "spread", "trace"), expected("trace", "gradient_gain"),
         drawn.curve("squared norm", "spread", "norm2"), expected("squared norm", "jacobian_norm2")),
        f"The squared norm is largest at a spread of {_most(drawn):g}, where a few keys compete.", log_x=True,
    )  # fmt: skip
    by_head_dim = Plot(
        f"Gradient on the first W_q, {depth} layers", "d_k", "norm",
        tuple(deep.curve(_named(scale), "head_dim", "first_query", scale=scale) for scale in SCALES),
        "Where a line is level, d_k does not matter.", log_x=True, log_y=True,
    )  # fmt: skip
    by_depth = Plot(
        f"Gradient on every W_q, d_k = {largest}", "block", "norm",
        tuple(deep.series(_named(scale), range(1, depth + 1), "query", scale=scale, head_dim=largest)
              for scale in SCALES),
        "What rises towards the first block grows on its way back.", log_y=True,
    )  # fmt: skip
    even = Plot(
        f"How evenly queries receive it, {depth} layers", "d_k", "median / root mean square",
        tuple(deep.curve(_named(scale), "head_dim", "evenness", scale=scale) for scale in SCALES),
        "1 would be every query alike; near 0, a few queries receive all.", log_x=True,
    )  # fmt: skip
    shared = Plot(
        f"Who receives it, d_k = {largest}, {depth} layers", "share of the queries, quietest first",
        "share of the gradient",
        (*(deep.series(_named(scale), along(), "shares", scale=scale, head_dim=largest) for scale in SCALES),
         Curve("all alike", tuple(along()), tuple(along()), is_theory=True)),
        "The straight line would be every query alike; a line along the floor that rises at the end is a few queries "
        "that receive nearly all.",
    )  # fmt: skip
    return (*maps, through, by_head_dim, by_depth, even, shared)


def _most(drawn: Outcomes) -> float:
    spreads: list[float] = drawn.values("spread")
    return max(spreads, key=lambda spread: drawn.band("norm2", spread=spread).mean)


EXPERIMENT = Experiment("gradients", "What do peaked and uniform rows let through, and what reaches W_q and W_k?",
                        grid, run, conclude, seeds=16, quick_seeds=6, version=2, core_minutes=6.5)  # fmt: skip
