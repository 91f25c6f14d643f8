"""Spread of the scores at initialisation, for several ways to draw weights: predicted, measured and calibrated."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnscale.lab.experiment import Check, Conclusion, Experiment, Outcome, Plot, Settings, Table, product
from attnscale.lab.outcomes import Band, Outcomes, banded, expected_curve, ranging, tally
from attnscale.measure import score_stats
from attnscale.rules import get_rule
from attnscale.theory import Prediction, predict, unit_variance_scale

HEADS, LENGTH = 4, 256
NEAR_ONE = 0.05  # a spread within this of one counts as one


@dataclass(frozen=True)
class Scheme:
    """Initialisation of W_q and W_k, (width, d_model) each, and the rule that scales the scores."""

    initialisation: str  # as theory.predict() has it
    draw: Callable[[Tensor], object]
    rule: str = "inverse_sqrt"
    packed: bool = False
    biased: bool = False

    def project(self, x: Tensor, heads: int = HEADS) -> tuple[Tensor, Tensor]:
        """Return queries and keys, (heads, length, head_dim) each."""
        width = x.shape[-1]
        if self.packed:
            whole = torch.empty(3 * width, width)  # q, k and v as one matrix
            self.draw(whole)
            weights = whole[:width], whole[width : 2 * width]
        else:
            weights = torch.empty(width, width), torch.empty(width, width)
            for weight in weights:
                self.draw(weight)
        biases = [torch.empty(width).uniform_(-(width**-0.5), width**-0.5) * self.biased for _ in weights]
        query, key = (
            (x @ weight.T + bias).unflatten(-1, (heads, -1)).transpose(0, 1)
            for weight, bias in zip(weights, biases, strict=True)
        )
        return query, key

    def predicted(self, d_model: int) -> Prediction:
        """Return the prediction of theory for the layer."""
        return predict(d_model, HEADS, LENGTH, initialisation=self.initialisation, packed=self.packed)

    def predicted_variance(self, d_model: int) -> float:
        """Return the variance of the scores under the scheme's own rule."""
        some = torch.zeros(1, d_model // HEADS)
        return get_rule(self.rule)(some, some)[2] ** 2 * self.unscaled_variance(d_model)

    def unscaled_variance(self, d_model: int) -> float:
        """Return the variance of q·k."""
        return self.predicted(d_model).score_std ** 2


SCHEMES = {
    "Xavier": Scheme("xavier", nn.init.xavier_uniform_),
    "Xavier packed": Scheme("xavier", nn.init.xavier_uniform_, packed=True),
    "Kaiming": Scheme("kaiming", nn.init.kaiming_normal_),
    "normal(0.02)": Scheme("normal:0.02", lambda weight: nn.init.normal_(weight, std=0.02)),
    "orthogonal": Scheme("orthogonal", nn.init.orthogonal_),
    "nn.Linear": Scheme("torch", lambda weight: nn.init.kaiming_uniform_(weight, a=math.sqrt(5)), biased=True),
    "muP": Scheme("lecun", lambda weight: nn.init.normal_(weight, std=weight.shape[1] ** -0.5), "mup"),
}


def grid(quick: bool) -> Sequence[Settings]:
    """List every scheme at every width; d_k is a quarter of it."""
    return product(scheme=SCHEMES, d_model=[64, 256] if quick else [64, 128, 256, 512, 768, 1024])


def run(scheme: str, d_model: int, seed: int) -> Outcome:
    """Project normalised inputs with fresh weights, and measure the scores, as they are and calibrated."""
    x = nn.functional.rms_norm(torch.randn(LENGTH, d_model), (d_model,))
    query, key = SCHEMES[scheme].project(x)
    stats = score_stats(query, key, scale=SCHEMES[scheme].rule)
    calibrated, _, _ = get_rule("calibrated")(query, key)
    factor = (calibrated * query).sum((-2, -1)) / query.square().sum((-2, -1))  # one for each head
    unit = score_stats(query, key, scale="calibrated")
    return {
        "variance": stats.variance.mean().item(),
        "uncalibrated": factor.pow(-2).mean().item(),  # variance of q·k, from the calibrated scale
        "off_unit": (unit.std - 1).abs().max().item(),
    }


def conclude(outcomes: Outcomes) -> Conclusion:
    """Compare every scheme with its prediction, and list those for which 1/√d_k is right."""
    widths, schemes = outcomes.values("d_model"), outcomes.values("scheme")
    checks, curves = [], 2 * len(schemes)
    for name in schemes:
        scheme, own = SCHEMES[name], outcomes.where(scheme=name)
        checks += [
            own.check(f"{name}: the variance of the scores matches theory", "variance", scheme.predicted_variance,
                      "d_model", curves),
            own.check(f"{name}: the calibrated scale matches theory", "uncalibrated",
                      scheme.unscaled_variance, "d_model", curves),
        ]  # fmt: skip
    checks.append(_unit(outcomes))
    spreads = {name: [_spread(outcomes, name, width)[0] for width in widths] for name in schemes}
    right = [name for name in schemes if all(abs(spread - 1) < NEAR_ONE for spread in spreads[name])]
    others = [name for name in schemes if name not in right]
    text = (
        f"At widths from {widths[0]} to {widths[-1]}, with d_k a quarter of the width, scores start with a spread of "
        f"one for {', '.join(right) or 'no scheme'}"
        + (f", and not for {'; '.join(f'{name} ({ranging(spreads[name])})' for name in others)}" if others else "")
        + f". {tally(checks)}"
    )
    return Conclusion(text, checks, [_table(outcomes)], [_plot(outcomes)])


def _spread(outcomes: Outcomes, scheme: str, d_model: int) -> tuple[float, float]:
    found = outcomes.band("variance", scheme=scheme, d_model=d_model)
    spread = math.sqrt(found.mean)
    return spread, found.margin / (2 * spread)


def _unit(outcomes: Outcomes) -> Check:
    off = max(found["off_unit"] for _, found in outcomes)
    return Check("the calibrated rule gives every head a spread of one", off < 1e-4,
                 f"{len(outcomes) * HEADS} heads, largest difference {off:.1g}")  # fmt: skip


def _table(outcomes: Outcomes) -> Table:
    rows = []
    for name in outcomes.values("scheme"):
        for width in outcomes.values("d_model"):
            scheme = SCHEMES[name]
            calibrated = unit_variance_scale(outcomes.band("uncalibrated", scheme=name, d_model=width).mean)
            rows.append((name, width, math.sqrt(scheme.predicted_variance(width)), *_spread(outcomes, name, width),
                         scheme.predicted(width)["calibrated"].scale, calibrated))  # fmt: skip
    columns = ("scheme", "d_model", "predicted", "measured", "±", "1/std predicted", "calibrated")
    return Table(f"Spread of the scores at initialisation, d_k = d_model/{HEADS}", columns, tuple(rows))


def _plot(outcomes: Outcomes) -> Plot:
    widths, curves = outcomes.values("d_model"), []
    for name in outcomes.values("scheme"):
        found = [Band(*_spread(outcomes, name, width), 0) for width in widths]
        theory = [math.sqrt(SCHEMES[name].predicted_variance(width)) for width in widths]
        curves += [banded(name, widths, found), expected_curve(name, widths, theory)]
    return Plot("Spread at initialisation", "d_model", "spread of the scores", tuple(curves),
                "1/√d_k is right for the schemes on the line at one.", log_x=True, log_y=True)  # fmt: skip


EXPERIMENT = Experiment("initialisation", "How far do scores spread at initialisation, and which scale makes it one?",
                        grid, run, conclude, seeds=16, quick_seeds=8, core_minutes=0.19)  # fmt: skip
