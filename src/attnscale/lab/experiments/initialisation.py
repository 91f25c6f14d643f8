"""How far scores spread at initialisation, for the ways weights are drawn: predicted, measured, and calibrated."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnscale.lab.cell import Outcome, Settings
from attnscale.lab.experiment import Conclusion, Experiment
from attnscale.lab.outcomes import Outcomes
from attnscale.lab.result import Check, Curve, Plot, Table, column
from attnscale.lab.wording import ranging, tally
from attnscale.measure import score_stats
from attnscale.rules import get_rule
from attnscale.rules.rule import Rule
from attnscale.theory import Prediction, expected_row, predict, unit_variance_scale

HEADS, LENGTH = 4, 256
MUP_RULE = "mup:64"  # muP's 8/d_k, which equals 1/√d_k at d_k = 64
NEAR_ONE = 0.05  # a spread this near to one is one
NORMAL = "normal(0.02)"
GPT2 = (768, 0.307)  # d_model, and the spread that N(0, 0.02²) gives it under 1/√d_k


@dataclass(frozen=True)
class Scheme:
    """How a layer draws W_q and W_k, (width, d_model) each, and what multiplies its scores."""

    initialisation: str  # as theory.predict() takes it
    draw: Callable[[Tensor], object]
    rule: str = "inverse_sqrt"
    packed: bool = False
    biased: bool = False

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, (heads, length, head_dim) each."""
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
            (x @ weight.T + bias).unflatten(-1, (HEADS, -1)).transpose(0, 1)
            for weight, bias in zip(weights, biases, strict=True)
        )
        return query, key

    def predicted(self, d_model: int) -> Prediction:
        """What theory says of the layer."""
        return predict(d_model, HEADS, LENGTH, initialisation=self.initialisation, packed=self.packed)

    def scale(self, d_model: int) -> float:
        """What multiplies the scores."""
        some = torch.zeros(1, d_model // HEADS)
        return self.scale_rule(some, some)[2]

    def predicted_variance(self, d_model: int) -> float:
        """Of the scores, with the scheme's own scale."""
        return (self.scale(d_model) * self.predicted(d_model).score_std) ** 2

    def expected_entropy(self, d_model: int) -> float:
        """H / ln n, with queries and keys taken as Gaussian: what softmax sees has no shift of a row in it."""
        seen = self.scale(d_model) * self.predicted(d_model)["unscaled"].softmax.spread
        return expected_row(seen, LENGTH, d_model // HEADS).entropy / math.log(LENGTH)

    @property
    def scale_rule(self) -> Rule:
        """The rule that has it."""
        return get_rule(self.rule)


SCHEMES = {
    "Xavier": Scheme("xavier", nn.init.xavier_uniform_),
    "Xavier packed": Scheme("xavier", nn.init.xavier_uniform_, packed=True),
    "Kaiming": Scheme("kaiming", nn.init.kaiming_normal_),
    NORMAL: Scheme("normal:0.02", lambda weight: nn.init.normal_(weight, std=0.02)),
    "orthogonal": Scheme("orthogonal", nn.init.orthogonal_),
    "nn.Linear": Scheme("torch", lambda weight: nn.init.kaiming_uniform_(weight, a=math.sqrt(5)), biased=True),
    "muP": Scheme("lecun", lambda weight: nn.init.normal_(weight, std=weight.shape[1] ** -0.5), MUP_RULE),
}


def grid(quick: bool) -> Sequence[Settings]:
    """Every scheme at every width; d_k is a quarter of it."""
    widths = [64, 256] if quick else [64, 128, 256, 512, 768, 1024]
    return [{"scheme": scheme, "d_model": d_model} for scheme in SCHEMES for d_model in widths]


def run(scheme: str, d_model: int, seed: int) -> Outcome:
    """Project normalised inputs with fresh weights, and measure the scores; then calibrate them."""
    x = nn.functional.rms_norm(torch.randn(LENGTH, d_model), (d_model,))
    query, key = SCHEMES[scheme].project(x)
    stats = score_stats(query, key, scale=SCHEMES[scheme].scale_rule)
    calibrated, _, _ = get_rule("calibrated")(query, key)
    factor = (calibrated * query).sum((-2, -1)) / query.square().sum((-2, -1))  # one a head
    unit = score_stats(query, key, scale="calibrated")
    return {
        "variance": stats.variance.mean().item(),
        "entropy_ratio": stats.entropy_ratio.mean().item(),
        "uncalibrated": factor.pow(-2).mean().item(),  # the variance of q·k that the rule found
        "off_unit": (unit.std - 1).abs().max().item(),
    }


def conclude(outcomes: Outcomes) -> Conclusion:
    """Whether the prediction holds for every scheme, and which of them 1/√d_k serves."""
    widths, schemes = outcomes.values("d_model"), outcomes.values("scheme")
    curves = 2 * len(schemes)
    checks = []
    for name in schemes:
        scheme = SCHEMES[name]
        own = outcomes.where(scheme=name)
        variances = {width: scheme.predicted_variance(width) for width in widths}
        plain = {width: scheme.predicted(width).score_std ** 2 for width in widths}
        checks += [
            own.check(f"{name}: the scores' variance is the one predicted", "variance", variances, "d_model", curves),
            own.check(f"{name}: the calibrated scale is the one predicted", "uncalibrated", plain, "d_model", curves),
        ]
    checks += [_unit(outcomes), *_gpt2(outcomes)]
    spreads = {name: [_spread(outcomes, name, width) for width in widths] for name in schemes}
    served = [name for name in schemes if all(abs(spread - 1) < NEAR_ONE for spread in spreads[name])]
    others = [name for name in schemes if name not in served]
    text = (
        f"Over widths from {widths[0]} to {widths[-1]}, d_k a quarter of them, scores start with a spread of one "
        + (f"for {', '.join(served)}" if served else "for no scheme")
        + (f", and not for {'; '.join(_other(name, spreads[name], widths) for name in others)}" if others else "")
        + ". "
        + _entropy(outcomes) + tally(checks)
    )  # fmt: skip
    return Conclusion(text, tuple(checks), (_table(outcomes),), _plots(outcomes))


def _spread(outcomes: Outcomes, scheme: str, d_model: int) -> float:
    return math.sqrt(outcomes.band("variance", scheme=scheme, d_model=d_model).mean)


def _other(name: str, spreads: Sequence[float], widths: Sequence[int]) -> str:
    if max(spreads) / min(spreads) < 1 + NEAR_ONE:
        return f"{name} ({ranging(spreads)})"
    way = "rising" if spreads[-1] > spreads[0] else "falling"
    return f"{name} ({way} from {spreads[0]:.3g} at {widths[0]} to {spreads[-1]:.3g} at {widths[-1]})"


def _entropy(outcomes: Outcomes) -> str:
    """How far the entropy is from that of Gaussian queries and keys, which these are only nearly."""
    off = {
        (name, width): abs(
            outcomes.band("entropy_ratio", scheme=name, d_model=width).mean - SCHEMES[name].expected_entropy(width)
        )
        for name in outcomes.values("scheme") for width in outcomes.values("d_model")
    }  # fmt: skip
    (name, width), most = max(off.items(), key=lambda item: item[1])
    return f"H/ln n is that of Gaussian queries and keys to {most:.2g} or better (worst for {name} at {width}). "


def _gpt2(outcomes: Outcomes) -> list[Check]:
    width, spread = GPT2
    own = outcomes.where(scheme=NORMAL, d_model=width)
    if not own.cells:
        return []
    found = own.band("variance")
    measured, reach = math.sqrt(found.mean), found.half / (2 * math.sqrt(found.mean))
    return [
        Check(f"GPT-2's N(0, 0.02²) starts with a spread of {spread} at its width, {width}",
              abs(measured - spread) < reach + 0.0005, f"measured {measured:.4f} ± {reach:.4f}")
    ]  # fmt: skip


def _unit(outcomes: Outcomes) -> Check:
    off = max(found["off_unit"] for _, found in outcomes)
    return Check("the calibrated rule makes the spread one in every head", off < 1e-4,
                 f"{len(outcomes) * HEADS} heads, off by at most {off:.1g}")  # fmt: skip


def _table(outcomes: Outcomes) -> Table:
    rows = []
    for name in outcomes.values("scheme"):
        for width in outcomes.values("d_model"):
            scheme = SCHEMES[name]
            found = outcomes.band("variance", scheme=name, d_model=width)
            calibrated = unit_variance_scale(outcomes.band("uncalibrated", scheme=name, d_model=width).mean)
            rows.append(
                (name, width, math.sqrt(scheme.predicted_variance(width)), math.sqrt(found.mean),
                 found.half / (2 * math.sqrt(found.mean)), scheme.predicted(width)["calibrated"].scale, calibrated)
            )  # fmt: skip
    columns = ("scheme", "d_model", "predicted", "measured", "±", "1/std predicted", "calibrated")
    return Table(f"Spread of the scores at initialisation, d_k = d_model/{HEADS}", columns, tuple(rows))


def _plots(outcomes: Outcomes) -> tuple[Plot, ...]:
    widths, schemes = outcomes.values("d_model"), outcomes.values("scheme")
    along = tuple(map(float, widths))

    def root(curve: Curve) -> Curve:
        y, low, high = (
            column([math.sqrt(max(value, 0.0)) if value is not None else math.nan for value in values or ()])
            for values in (curve.y, curve.low, curve.high)
        )
        return Curve(curve.name, curve.x, y, low, high)

    curves: list[Curve] = []
    for name in schemes:
        theory = [math.sqrt(SCHEMES[name].predicted_variance(width)) for width in widths]
        curves += [
            root(outcomes.curve(name, "d_model", "variance", scheme=name)),
            Curve(f"{name}, expected", along, column(theory), is_theory=True),
        ]
    entropy = tuple(outcomes.curve(name, "d_model", "entropy_ratio", scheme=name) for name in schemes)
    return (
        Plot("Spread at initialisation", "d_model", "spread of the scores", tuple(curves),
             "1/√d_k gives one only to the schemes on the line at one.", log_x=True, log_y=True),
        Plot("Entropy at initialisation", "d_model", "H / ln n", entropy,
             f"Near 1 every one of {LENGTH} keys counts alike: attention starts by averaging.", log_x=True),
    )  # fmt: skip


EXPERIMENT = Experiment("initialisation", "How far do scores spread at initialisation, and which scale makes it one?",
                        grid, run, conclude, seeds=16, quick_seeds=8, core_minutes=0.24)  # fmt: skip
