"""A verdict follows what is computed: change that, and the verdict changes with it."""

import dataclasses
import math

import numpy as np
import pytest

from attnscale.claims import computations, ledger, post, settings, textbook
from attnscale.claims.computations import WithoutScale
from attnscale.claims.ledger import recorded
from attnscale.claims.post import PrecisionLoss
from attnscale.lab.outcomes import Band, Outcomes


@pytest.fixture(autouse=True)
def _no_training(monkeypatch):
    monkeypatch.setattr(textbook, "_fresh_cost", lambda: 0.7)  # as models of eight seeds give


def wide(dim, divisor=1.0):
    """Scores that spread as d_k, not as its root."""
    return Band(dim / divisor, 0.01 * dim / divisor, 9)


def squared(dim):
    """Variances that grow as d_k², not as d_k."""
    return Outcomes([({"head_dim": dim, "seed": seed}, {"variance": dim**2}) for seed in range(3)])


ROWS = computations.drawn_rows(4, 2.0)


def rows(**means):
    def made(dim, divisor=1.0, keys=1024):
        return dataclasses.replace(ROWS, **{name: np.full(7, value(dim, divisor)) for name, value in means.items()})

    return made


def exact(value):
    return Band(value, 0.0, 9)


EVEN = {"first_query": exact(1.0), "backwards": exact(1.0)}
SAME, GONE = (WithoutScale(*map(exact, (times, times, 0.4, 0.4))) for times in (1.0, 0.01))
BUNDLED = {"1/√d_k": exact(1.0), "none": exact(1.0), "1/d_k": exact(1.0)}
RISING = rows(entropy_ratio=lambda d, by: 1 / by)

# claim, where, what is computed there, what it then computes, the verdict then
FLIPS = [
    ("score-variance", computations, "drawn_spread", wide, "refuted"),
    ("large-scores-sharpen", computations, "drawn_rows", rows(top1=lambda d, by: 0.5), "refuted"),
    ("scaled-variance-near-one", computations, "drawn_spread", wide, "refuted"),
    ("score-std-root-dim", computations, "drawn_spread", wide, "refuted"),
    ("inverse-dim-uniform", computations, "drawn_rows", rows(entropy_ratio=lambda d, by: 0.9), "refuted"),
    ("inverse-dim-cannot-focus", post, "_weight_of_match", lambda divisor: exact(0.5), "refuted"),
    ("inverse-dim-precision", post, "precision_loss", lambda scale, dim, kind: PrecisionLoss(scale, scale), "refuted"),
    ("wide-range-of-dims", computations, "final_loss", lambda dim: exact(3.0 if dim > 100 else 0.5), "refuted"),
    ("inverse-dim-harms", computations, "extra_loss", lambda dim, scale: Band(0.1, 0.2, 5), "refuted"),
    ("avoids-exploding-and-vanishing", computations, "gradients", lambda scale: EVEN, "refuted"),
    ("unit-variance-common", computations, "head_std", lambda name: exact(1.0), "confirmed"),
    ("three-regimes", computations, "drawn_scores", lambda dim: np.ones((2, 3)), "refuted"),
    ("validated-widely", post, "SETTINGS", post.SETTINGS[:3], "refuted"),
    ("wider-is-worse", computations, "drawn_rows", rows(jacobian_trace=lambda d, by: d), "refuted"),
    ("variance-always-exact", computations, "enumerated_variance", lambda values, dim: dim + 1.0, "refuted"),
    ("unscaled-stops-learning", computations, "gradient_without_scale", lambda dim, keys: SAME, "refuted"),
    ("unscaled-stops-learning", computations, "gradient_without_scale", lambda dim, keys: GONE, "confirmed"),
    ("struggles-without", computations, "final_loss", lambda dim, scale="1/√d_k": exact(0.5), "refuted"),
    ("paper-reason", computations, "enumerated_mean", lambda values, dim: 1.0, "refuted"),
    ("variance-linear", computations, "drawn_pairs", squared, "refuted"),
    ("saturates-at-64", computations, "drawn_spread", lambda dim: exact(1.0), "refuted"),
    ("random-init-normal", computations, "head_spread", lambda name: exact(8.0), "confirmed"),
    ("trained-controlled", computations, "bundled_scores", lambda: {"std": 9.0, "max": 500.0}, "refuted"),
    ("trained-less-critical", computations, "bundled", (BUNDLED | {"none": exact(5.0)}).get, "refuted"),
    ("trained-less-critical", computations, "bundled", BUNDLED.get, "confirmed"),
    ("efficient-learn-temperature", settings, "LEARNED", settings.LEARNED[:1], "refuted"),
    ("stable-training-any-dim", computations, "final_loss", lambda dim, rate: exact(0.5), "confirmed"),
    ("stable-training-any-dim", computations, "final_loss", lambda dim, rate: exact(3.0), "refuted"),
    ("small-temperature-sharper", computations, "drawn_rows", RISING, "refuted"),
    ("modern-llms-universal", settings, "language_models", lambda **_: [settings.find("GPT-2")], "confirmed"),
    ("initialisation-dependent", computations, "head_spread", lambda name: exact(8.0), "refuted"),
    ("small-dim-hardly-matters", computations, "drawn_rows", rows(jacobian_trace=lambda d, by: by), "refuted"),
    ("small-dim-hardly-matters", computations, "drawn_rows", rows(jacobian_trace=lambda d, by: 0.9), "confirmed"),
    ("always-scale", computations, "t5_spread", lambda: 8.0, "confirmed"),
    ("own-terms-64", computations, "sampled_terms", lambda dim: np.ones((dim, dim)), "refuted"),
]


@pytest.mark.parametrize(("name", "where", "what", "instead", "then"), FLIPS)
def test_a_verdict_flips_when_the_computed_value_does(monkeypatch, name, where, what, instead, then):
    assert recorded()[name] != then
    monkeypatch.setattr(where, what, instead)
    assert ledger([name])[0].verdict == then


def test_drawn_and_enumerated_components_have_the_stated_variance():
    assert computations.agrees(computations.drawn_spread(7), 7**0.5)
    assert not computations.agrees(computations.drawn_spread(7), 8**0.5)
    assert computations.enumerated_variance((-1.0, 1.0), 11) == pytest.approx(11)
    assert computations.enumerated_mean((0.0, 2.0), 3) == pytest.approx(3)  # of means one


def test_low_precision_loses_nothing_where_nothing_is_small():
    same = post.precision_loss(0.125, 64, "float16")
    assert 0 < same.output < 1e-3
    assert same.gradients < 0.05


def test_a_model_that_guesses_has_learned_nothing():
    assert not computations.has_learned(exact(computations.TASK.chance))
    assert not computations.has_learned(exact(math.nan))
    assert computations.has_learned(exact(0.5))
