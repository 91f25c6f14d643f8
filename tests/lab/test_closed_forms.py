"""Experiments without training: their numbers match theory, errors are noticed, and sentences follow the numbers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from attnscale.lab.experiments import divisors, gradients, initialisation, length, saturation, variance
from attnscale.measure import score_stats
from attnscale.rules import constant
from tests.lab.conclusions import concluded, failed, made_up, quick, rerun

NAMES = ("variance", "saturation", "divisors", "gradients", "initialisation", "length")


@pytest.mark.parametrize("name", NAMES)
def test_every_check_passes(name):
    conclusion = concluded(name)
    assert not failed(conclusion)
    assert f"All {len(conclusion.checks)} checks pass." in conclusion.text


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gradients"])  # whose checks are exact
def test_one_seed_confirms_nothing_that_needs_an_interval(name):
    conclusion = concluded(name, quick(name).where(seed=0))
    assert any("one seed has no interval" in check.evidence for check in conclusion.checks)
    assert not any(check.holds and "interval" in check.evidence for check in conclusion.checks)
    assert "Undecided: " in conclusion.text


def _wider_scores(patch):
    patch.setattr(saturation, "score_stats", lambda q, k, *, scale: score_stats(q, k, scale=1.1 * scale))


def _wider_weights(patch):
    wider = replace(initialisation.SCHEMES["orthogonal"], draw=lambda weight: nn.init.orthogonal_(weight, gain=1.1))
    patch.setitem(initialisation.SCHEMES, "orthogonal", wider)


def _unsquared_yarn(patch):
    """YaRN's √(1/t) multiplies q and k both, so the scores by its square."""
    plain, some = length.rule_for, torch.zeros(1, length.HEAD_DIM)

    def once(rule, keys):
        found = plain(rule, keys)
        return found if rule != "YaRN" else constant(math.sqrt(found(some, some)[2] * length.HEAD_DIM**-0.5))

    patch.setattr(length, "rule_for", once)


def _other_softmax(patch):
    plain = gradients.softmax_of
    patch.setattr(gradients, "softmax_of", lambda scores: plain(0.9 * scores))


ERRORS = [
    ("variance", {"case": "uniform"}, "uniform: Var(q·k) = 1 d_k",
     lambda patch: patch.setitem(variance.DRAWS, "uniform", lambda *shape: 1.8 * (2 * torch.rand(*shape) - 1))),
    ("divisors", {"divisor": "√d_k"}, "divided by √d_k, Var(scores) matches theory",
     lambda patch: patch.setitem(divisors.RULES, "√d_k", "constant:0.2")),
    ("saturation", {"part": saturation.MANY, "keys": 1024}, "entropy over 1024 Gaussian scores", _wider_scores),
    ("gradients", {"part": gradients.NAMED}, "by automatic differentiation", _other_softmax),
    ("initialisation", {"scheme": "orthogonal"}, "orthogonal: the calibrated scale", _wider_weights),
    ("length", {"rule": "YaRN", "causal": False}, "YaRN: entropy over Gaussian keys", _unsquared_yarn),
]  # fmt: skip


@pytest.mark.parametrize(("name", "where", "statement", "break_it"), ERRORS, ids=[row[0] for row in ERRORS])
def test_an_error_fails_its_check_and_is_named_in_the_text(monkeypatch, name, where, statement, break_it):
    with monkeypatch.context() as patch:
        break_it(patch)
        found = rerun(name, **where)
    if name == "length":
        length.expected_entropy.cache_clear()
    conclusion = concluded(name, found)
    assert any(statement in each for each in failed(conclusion))
    assert "Failed: " in conclusion.text
    assert all(each in conclusion.text for each in failed(conclusion))


def test_another_power_of_d_k_is_reported():
    def squared(own, found):
        return {"variance": found["variance"] * own["head_dim"], "scaled_variance": found["variance"]}

    assert "to the power 0.9" in concluded("variance").text
    assert "to the power 1.9" in concluded("variance", made_up(quick("variance"), squared)).text


def test_without_a_divisor_more_gradient_reaches_the_median_query_and_is_shared_less_evenly():
    text = concluded("divisors").text
    assert "the gradient on the median query is larger for 4 of 5 shapes" in text
    for head_dim, keys in divisors.KINDS:
        at = quick("divisors").where(part=divisors.SHAPES, head_dim=head_dim, keys=keys)
        assert at.difference("lower_half", {"divisor": "none"}, {"divisor": "√d_k"}).high < -0.1
    less = made_up(quick("divisors"), lambda own, _: {"median_query": 0.5 if own["divisor"] == "none" else 1.0})
    assert "larger for 0 of 5 shapes" in concluded("divisors", less).text


def test_without_a_scale_more_gradient_arrives_and_is_shared_less_evenly():
    models = quick("gradients").where(part=gradients.MODEL, head_dim=128)
    none, root, by_dim = (models.band("first_query", scale=scale) for scale in ("none", "1/√d_k", "1/d_k"))
    assert none.low > 3 * root.high
    assert by_dim.high < 0.2 * root.low
    assert models.difference("lower_half", {"scale": "none"}, {"scale": "1/√d_k"}).high < -0.1
    text = concluded("gradients").text
    assert "Without a scale more gradient reaches the first layer's queries at d_k = 128" in text
    assert "is shared less evenly" in text


def test_a_vanishing_gradient_is_reported():
    def vanishing(own, found):
        return {"on_queries": 1e-3 * found["on_queries"]} if own.get("scale") == "none" else {}

    text = concluded("gradients", made_up(quick("gradients"), vanishing)).text
    assert "Without a scale less gradient reaches the first layer's queries" in text


def test_schemes_draw_as_torch_does():
    torch.manual_seed(0)
    x = torch.randn(512, 256)
    linear, packed = nn.Linear(256, 256), nn.MultiheadAttention(256, initialisation.HEADS)
    made = {"nn.Linear": linear(x), "Xavier packed": x @ packed.in_proj_weight[:256].T}
    for name, projected in made.items():
        query, _ = initialisation.SCHEMES[name].project(x)
        assert query.std().item() == pytest.approx(projected.std().item(), rel=0.02)


def test_a_constant_and_a_falling_entropy_are_reported():
    def level(own, found):
        return {"entropy": 3.0 + 0.01 * own["seed"]}

    def falling(own, found):
        return {"entropy": 10 - math.log(own["length"]) + 0.01 * own["seed"] * own["length"] ** 0.1}

    assert "Under 1/√d_k entropy stays the same" in concluded("length", made_up(quick("length"), level)).text
    text = concluded("length", made_up(quick("length"), falling)).text
    assert "Under 1/√d_k attention becomes sharper with length" in text
