"""Predict a model's attention at initialisation from its shape."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from attnscale.errors import SettingError
from attnscale.theory.gaussian import SoftmaxExpectation, expected_softmax
from attnscale.theory.limits import critical_spread, regime
from attnscale.theory.variance import Initialisation, row_variance, score_variance, unit_variance_scale

LARGEST = 10**18  # limit for d_model, heads, d_k and keys; larger numbers could overflow
PACKED_PROJECTIONS = 3  # nn.MultiheadAttention draws q, k and v as one matrix of 3 · d_model rows


@dataclass(frozen=True)
class Candidate:
    """Multiplier, with the resulting spread of the scores and statistics of the softmax."""

    name: str
    scale: float
    spread: float
    softmax: SoftmaxExpectation
    regime: str


@dataclass(frozen=True)
class Prediction:
    """Spread of q, k and the scores at initialisation, for each candidate scale."""

    d_model: int
    heads: int
    head_dim: int
    length: int
    initialisation: str
    query_std: float
    key_std: float
    score_std: float
    critical_spread: float
    candidates: tuple[Candidate, ...]
    advice: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        fields = asdict(self)
        for candidate, shown in zip(self.candidates, fields["candidates"], strict=True):
            shown["softmax"]["entropy_ratio"] = candidate.softmax.entropy_ratio
        return fields

    def __getitem__(self, name: str) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.name == name)


def predict(
    d_model: int,
    heads: int,
    length: int,
    *,
    initialisation: Initialisation | str = "xavier",
    head_dim: int | None = None,
    input_variance: float = 1.0,
    packed: bool = False,
) -> Prediction:
    """Predict the scores of a freshly initialised attention layer over `length` keys.

    `packed` draws q, k and v as one matrix, as nn.MultiheadAttention does. The input is taken as zero-mean with
    `input_variance`, which is 1 after LayerNorm or RMSNorm.
    """
    head_dim = _head_dim(d_model, heads) if head_dim is None else head_dim
    for name, value, least in (("d_model", d_model, 1), ("head_dim", head_dim, 1), ("length", length, 2)):
        if value < least:
            raise SettingError(f"Expected {name} of at least {least}, got {value}.")
    if not 0 < input_variance < math.inf:
        raise SettingError(f"Expected a positive, finite input variance, got {input_variance}.")
    init = Initialisation.parse(initialisation) if isinstance(initialisation, str) else initialisation

    if max(d_model, heads, head_dim, length) > LARGEST:
        raise SettingError(f"Expected d_model, heads, head_dim and length of at most {LARGEST:.0e}, got more.")
    fan_out = heads * head_dim * (PACKED_PROJECTIONS if packed else 1)
    projected = init.projected_variance(d_model, fan_out, input_variance)
    bias = init.bias_variance(d_model)
    mean = math.sqrt(bias)  # typical mean of a component, caused by its bias
    pooled = score_variance(head_dim, mean, projected, mean, projected)
    if not 0 < pooled < math.inf:
        raise SettingError(
            f"Expected scores of a finite spread above zero, and weights by {init} on inputs of variance "
            f"{input_variance:g} give none; start nearer to one."
        )
    within_rows = row_variance(head_dim, mean, projected, projected)  # the part that softmax sees

    def candidate(name: str, scale: float) -> Candidate:
        spread = scale * math.sqrt(within_rows)
        return Candidate(
            name, scale, scale * math.sqrt(pooled), expected_softmax(spread, length), regime(spread, length)
        )

    candidates = (
        candidate("unscaled", 1.0),
        candidate("inverse_sqrt", head_dim**-0.5),
        candidate("inverse_dim", 1 / head_dim),
        candidate("calibrated", unit_variance_scale(pooled)),
    )
    std, critical = math.sqrt(projected + bias), critical_spread(length)
    shape = (d_model, heads, head_dim, length, str(init))
    return Prediction(*shape, std, std, math.sqrt(pooled), critical, candidates, _advice(candidates, std))


def _head_dim(d_model: int, heads: int) -> int:
    if heads < 1 or d_model % heads:
        raise SettingError(
            f"Expected heads that divide d_model, got d_model={d_model} and heads={heads}; "
            "give the head dimension itself if the heads do not share d_model."
        )
    return d_model // heads


def _advice(candidates: tuple[Candidate, ...], projected_std: float) -> str:
    unscaled, standard, _, calibrated = candidates
    without = {
        "sharp": f"without a scale the spread would be {unscaled.spread:.2g} and softmax would start sharp",
        "healthy": f"even without a scale the spread, {unscaled.spread:.2g}, stays below the critical spread",
        "diluted": f"even without a scale the spread is only {unscaled.spread:.2g}",
    }[unscaled.regime]
    if math.isclose(standard.spread, 1.0, rel_tol=0.05):
        few = "" if standard.regime == "healthy" else ", which over so few keys is near the critical spread already"
        return f"Use 1/√d_k: the scores start with a spread of one, as intended{few}; {without}."
    if standard.regime == "healthy":
        return (
            f"Use 1/√d_k: the scores start with a spread of {standard.spread:.2g}, since q and k start at "
            f"{projected_std:.2g} and not 1; {calibrated.scale:.3g} instead of {standard.scale:.3g} would make it one; "
            f"{without}."
        )
    found = "too sharp to learn from" if standard.regime == "sharp" else "nearly uniform attention"
    return (
        f"1/√d_k is not the right constant here: it starts with a spread of {standard.spread:.2g}, {found}, since q "
        f"and k start at {projected_std:.2g}, not 1; use {calibrated.scale:.3g} (or the rule 'calibrated'); {without}."
    )
