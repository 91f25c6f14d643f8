"""Judgements that claims share: each computes, compares with what a claim expects, and shows the numbers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from attnscale.claims import computations as compute
from attnscale.claims.computations import DIM, KEYS, NEAR_ONE, SKEWED, SPREAD
from attnscale.claims.judging import Evidence, Limit
from attnscale.lab.outcomes import Band
from attnscale.reference import row_statistics

UNIT = "when q and k have unit variance"
NEGLIGIBLE_GRADIENT = 0.1  # of the gradient with 1/√d_k
SYMBOLS = {"top1": "largest weight", "jacobian_trace": "1 − Σp²", "effective_keys": "effective keys"}


def ordered(what: str, values: Mapping[str, Band | float], form: str) -> Evidence:
    """Test if each value is below the next one, beyond the error of both."""
    bands = [value if isinstance(value, Band) else Band(value, 0.0, 0) for value in values.values()]
    shown = ", ".join(f"{value:{form}} {name}" for name, value in values.items())
    return Evidence(all(low.high < high.low for low, high in pairwise(bands)), f"{what} {shown}")


def near_one(what: str, values: Mapping[str, Band | float]) -> Evidence:
    """Test if every value is within 0.05 of one."""
    means = [value.mean if isinstance(value, Band) else value for value in values.values()]
    shown = ", ".join(f"{value:.2f} ({name})" for name, value in values.items())
    return Evidence(all(abs(mean - 1) < NEAR_ONE for mean in means), f"{what} {shown}")


def published(found: Iterable[object], holds: bool) -> Evidence:
    """Show what was found among published models."""
    return Evidence(holds, f"published: {', '.join(map(str, found)) or 'none here'}")


def published_some(found: Sequence[object], at_least: int = 1) -> Evidence:
    """Test if enough published models were found."""
    return published(found, len(found) >= at_least)


def published_none(found: Sequence[object]) -> Evidence:
    """Test if no published model was found; a model is shown with its multiplier times √d_k."""
    return published(found, not found)


def row_has(scores: ArrayLike, statistic: str, *, above: float = -math.inf, below: float = math.inf) -> Evidence:
    """Test if a statistic of one row of scores is within limits."""
    value = getattr(row_statistics(scores), statistic).item()
    return Evidence(above < value < below, f"{SYMBOLS[statistic]} {value:#.3g}")


def is_softer(before: ArrayLike, after: ArrayLike) -> Evidence:
    """Test if the weights of the second row of scores are more even than those of the first."""
    keys = {name: row_statistics(row).effective_keys.item() for name, row in (("before", before), ("after", after))}
    return ordered("effective keys", keys, ".2f")


def drawn_spread_is(power: float, *dims: int) -> Evidence:
    """Test if random scores, divided by d_k to a power, have the standard deviation √d_k over the divisor."""
    spreads = {dim: compute.drawn_spread(dim, dim**power) for dim in dims}
    holds = all(compute.agrees(spread, dim ** (0.5 - power)) for dim, spread in spreads.items())
    ends = dict.fromkeys((dims[0], dims[-1]))
    return Evidence(holds, "drawn: spread " + ", ".join(f"{spreads[dim]:#.3g} at d_k = {dim}" for dim in ends))


def mostly_one_hot() -> Evidence:
    """Test if most rows of unscaled scores at d_k = 64 give one key a weight of 0.99."""
    share = compute.saturated_share(DIM, 1.0)
    return Evidence(share.low > 0.5, f"drawn at d_k = {DIM}: {share:.1%} of rows over {KEYS} keys give one key 0.99")


def gpt2_scaled_spread() -> Evidence:
    """Test if GPT-2's scaled scores start with a spread of one."""
    return near_one("spread", {"GPT-2": compute.head_spread("GPT-2").mean / SPREAD})


def layer_norm_centres() -> Evidence:
    """Test if LayerNorm, without gain and bias, gives mean 0 and variance 1."""
    x = np.array(SKEWED) + 1
    normed = (x - x.mean()) / x.std()
    shown = f"mean {abs(normed.mean()):.2f} and std {normed.std():.2f} after LayerNorm"
    return Evidence(np.allclose([normed.mean(), normed.std()], [0, 1]), shown)


def softmax_passes_little() -> Evidence:
    """Test if the gradient on the scores of the median row is small without a scale, at a large d_k."""
    found = compute.gradient_without_scale(512, 64).on_scores
    shown = f"median row at d_k = 512 over 64 keys: {found:.2g} times that with it"
    return Evidence(found.high < NEGLIGIBLE_GRADIENT, shown)


def queries_receive_little() -> Evidence:
    """Test if the gradient on the median query is small without a scale, at the d_k of most models."""
    found = compute.gradient_without_scale(DIM, 64)
    shown = (
        f"median query at d_k = {DIM} over 64 keys: {found.on_query:.2g} times, the lower half of the queries sharing "
        f"{found.lower_half:.1%} instead of {found.lower_half_scaled:.0%}"
    )
    return Evidence(found.on_query.high < NEGLIGIBLE_GRADIENT, shown)


AT_GPT2 = Limit(UNIT, "when weights start from N(0, 0.02²)", gpt2_scaled_spread, is_stated=True)
AT_SOFTMAX = Limit(
    "of the gradient on most rows' scores, where √d_k is much larger than √(2 ln n)",
    "of the gradient on queries, which is larger without a scale but shared less evenly",
    queries_receive_little,
)
