"""A verdict follows what is computed: change that, and the verdict changes with it."""

import dataclasses
import math

import numpy as np
import pytest

from attnscale.claims import (
    discussion,
    draws,
    evidence,
    ledger,
    post,
    practice,
    precision,
    textbook,
    trained,
    tutorial,
    worked_numbers,
)
from attnscale.claims.draws import Spread
from attnscale.claims.judging import Number, judge
from attnscale.claims.ledger import ENTRIES, recorded
from attnscale.claims.precision import Lost

NUMBERS = [(entry, source) for source, entries in ENTRIES for entry in entries if isinstance(entry, Number)]


def verdict(name):
    return ledger([name])[0].verdict


def wide(dim, shift=0.0):
    """Scores that spread as d_k, not as its root."""
    return Spread(float(dim**2), 0.01 * dim**2)


def rows(**means):
    def made(dim, divisor=1.0, keys=1024):
        return dataclasses.replace(
            draws.drawn_rows(4, 2.0), **{name: np.full(7, value(dim, divisor)) for name, value in means.items()}
        )

    return made


LEARNS = {"1/√d_k": 0.5, "1/d_k": 0.5, "none": 0.5}
EVEN = {"first_query": 1.0, "backwards": 1.0, "evenness": 0.8, "lower_half": 0.3, "on_queries": 1.0}
GONE = {**EVEN, "evenness": 0.01, "lower_half": 0.001, "on_queries": 0.01}

# claim, where, what is computed there, what it then computes, the verdict then
FLIPS = [
    ("score-variance", post, "drawn_spread", wide, "refuted"),
    ("large-scores-sharpen", post, "drawn_rows", rows(top1=lambda d, by: 0.5), "refuted"),
    ("scaled-variance-near-one", evidence, "drawn_spread", wide, "refuted"),
    ("inverse-dim-variance", post, "drawn_spread", wide, "refuted"),
    ("inverse-dim-uniform", post, "drawn_rows", rows(entropy_ratio=lambda d, by: 0.9), "refuted"),
    ("inverse-dim-cannot-focus", post, "_weight_of_match", lambda divisor: 0.5, "refuted"),
    ("inverse-dim-precision", post, "lost", lambda scale, dim, kind: Lost(scale, scale), "refuted"),
    ("wide-range-of-dims", post, "final_loss", lambda dim, *_: 3.0 if dim > 100 else 0.5, "refuted"),
    ("wide-range-of-dims", post, "final_loss", lambda dim, *_: math.nan, "refuted"),
    ("inverse-dim-harms", post, "final_loss", lambda dim, scale="1/√d_k": LEARNS[scale], "refuted"),
    ("avoids-exploding-and-vanishing", post, "gradients", lambda scale: EVEN, "refuted"),
    ("avoids-exploding-and-vanishing", post, "gradients", lambda scale: GONE if scale == "none" else EVEN, "refuted"),
    ("unit-variance-common", post, "head_std", lambda name: 1.0, "confirmed"),
    ("three-regimes", post, "drawn_scores", lambda dim: np.ones((2, 3)), "refuted"),
    ("validated-widely", post, "SETTINGS", post.SETTINGS[:3], "refuted"),
    ("dot-products-grow", tutorial, "drawn_spread", lambda dim, shift=0.0: Spread(4.0, 0.1), "refuted"),
    ("wider-is-worse", tutorial, "drawn_rows", rows(gradient_gain=lambda d, by: d), "refuted"),
    ("variance-always-exact", evidence, "enumerated_variance", lambda values, dim: dim + 1.0, "refuted"),
    ("divisor-from-variance", tutorial, "drawn_spread", wide, "refuted"),
    ("correct-factor", tutorial, "drawn_spread", wide, "refuted"),
    ("unscaled-stops-learning", tutorial, "gradients", lambda scale: EVEN, "refuted"),
    ("unscaled-stops-learning", tutorial, "gradients", lambda scale: GONE if scale == "none" else EVEN, "confirmed"),
    ("struggles-without", tutorial, "final_loss", lambda dim, scale="1/√d_k": LEARNS[scale], "refuted"),
    ("paper-reason", tutorial, "enumerated_mean", lambda values, dim: 1.0, "refuted"),
    ("unscaled-one-hot", tutorial, "drawn_rows", rows(top1=lambda d, by: 0.999), "confirmed"),
    ("variance-linear", textbook, "drawn_spread", wide, "refuted"),
    ("std-512", textbook, "drawn_spread", wide, "refuted"),
    ("score-std-64", textbook, "drawn_spread", wide, "refuted"),
    ("gradient-flow", textbook, "gradients", lambda scale: EVEN, "refuted"),
    ("gradient-flow", textbook, "gradients", lambda scale: GONE if scale == "none" else EVEN, "confirmed"),
    ("saturates-at-64", textbook, "drawn_spread", lambda dim: Spread(1.0, 0.01), "refuted"),
    ("random-init-normal", practice, "head_spread", lambda name: 8.0, "confirmed"),
    ("random-init-normal", practice, "drawn_spread", wide, "refuted"),
    ("trained-controlled", practice, "bundled_scores", lambda: {"std": 9.0, "max": 500.0}, "refuted"),
    ("trained-less-critical", practice, "bundled", {"1/√d_k": 1.0, "none": 5.0, "1/d_k": 1.0}.get, "refuted"),
    ("trained-less-critical", practice, "bundled", {"1/√d_k": 1.0, "none": 1.0, "1/d_k": 1.0}.get, "confirmed"),
    ("learned-temperature", practice, "LEARNED", (), "refuted"),
    ("efficient-learn-temperature", practice, "LEARNED", practice.LEARNED[:1], "refuted"),
    ("stable-training-any-dim", practice, "final_loss", lambda dim, scale="", rate=1.0: 0.5, "confirmed"),
    ("stable-training-any-dim", practice, "final_loss", lambda dim, scale="", rate=1.0: 3.0, "refuted"),
    ("high-dim-critical", practice, "drawn_spread", lambda dim: Spread(1.0, 0.01), "refuted"),
    ("small-temperature-sharper", practice, "_entropy_at", lambda tau: -tau, "refuted"),
    ("large-temperature-softer", practice, "_entropy_at", lambda tau: -tau, "refuted"),
    ("modern-llms-universal", practice, "language_models", lambda **_: [practice.find("GPT-2")], "confirmed"),
    ("score-std-root-dim", discussion, "drawn_spread", wide, "refuted"),
    ("initialisation-dependent", discussion, "head_spread", lambda name: 8.0, "refuted"),
    ("xavier-unit-variance", discussion, "head_std", lambda name: 1.0, "confirmed"),
    ("almost-none-explain", discussion, "_told", lambda told: [], "confirmed"),
    ("all-name-saturation", discussion, "_told", lambda told: ["post"], "refuted"),
    ("small-dim-hardly-matters", tutorial, "drawn_rows", rows(gradient_gain=lambda d, by: by), "refuted"),
    ("small-dim-hardly-matters", tutorial, "drawn_rows", rows(gradient_gain=lambda d, by: 0.9), "confirmed"),
    ("always-scale", practice, "t5_spread", lambda: 8.0, "confirmed"),
    ("own-terms-64", worked_numbers, "sampled_terms", lambda dim: np.ones((dim, dim)), "refuted"),
    ("variance-64", worked_numbers, "enumerated_variance", lambda values, dim: dim + 1.0, "refuted"),
]


@pytest.mark.parametrize(("name", "where", "what", "instead", "then"), FLIPS)
def test_a_verdict_flips_when_what_is_computed_does(monkeypatch, name, where, what, instead, then):
    assert recorded()[name] != then
    monkeypatch.setattr(where, what, instead)
    assert verdict(name) == then


@pytest.mark.parametrize(("entry", "source"), NUMBERS, ids=[entry.id for entry, _ in NUMBERS])
def test_a_number_is_refuted_or_confirmed_by_what_is_computed(entry, source):
    claimed = [float(text.replace(",", "")) for text in entry.claimed.split()]
    assert judge(dataclasses.replace(entry, compute=lambda: np.array(claimed)), source).verdict == "confirmed"
    assert judge(dataclasses.replace(entry, compute=lambda: np.array(claimed) + 1.0), source).verdict == (
        "confirmed" if claimed[0] > 2**53 else "refuted"
    )


def test_what_is_drawn_has_the_variance_it_was_drawn_with():
    assert draws.drawn_spread(7).is_(7.0)
    assert not draws.drawn_spread(7).is_(8.0)
    assert draws.drawn_spread(7, shift=1.0).is_(21.0)  # d (1 + 1 + 1)
    assert draws.enumerated_variance((-1.0, 1.0), 11) == pytest.approx(11)
    assert draws.enumerated_mean((0.0, 2.0), 3) == pytest.approx(3)  # of means one


def test_low_precision_loses_nothing_where_nothing_is_small():
    same = precision.lost(0.125, 64, "float16")
    assert 0 < same.output < 1e-3
    assert same.gradients < 0.05


def test_a_model_that_guesses_has_learned_nothing():
    assert not trained.has_learned(trained.TASK.chance)
    assert not trained.has_learned(math.nan)
    assert trained.has_learned(0.5)
