import numpy as np
import pytest

from attnscale.lab.experiments import gradients
from attnscale.lab.experiments.gradients import AHEAD, DRAWN, MODEL, NAMED, UNIFORM
from tests.lab.concluding import all_hold, concluded, made_up, quick, rerun, seen_to_be_wrong


def test_jacobians_are_their_closed_forms_and_both_weights_are_pulled_alike():
    assert all_hold(concluded("gradients"))
    jacobians = quick("gradients").where(part=NAMED).cells[0][1]
    assert np.trace(jacobians[UNIFORM]) == pytest.approx(0.8)
    assert abs(np.array(jacobians[AHEAD])).max() < 1e-8


def test_without_a_scale_more_gradient_arrives_and_less_evenly():
    models = quick("gradients").where(part=MODEL, head_dim=128)
    assert models.ratio("first_query", {"scale": "none"}, {"scale": "1/√d_k"}).low > 3
    assert models.ratio("first_query", {"scale": "1/d_k"}, {"scale": "1/√d_k"}).high < 0.2
    assert models.difference("evenness", {"scale": "none"}, {"scale": "1/√d_k"}).high < -0.5
    assert models.difference("gradient_gain", {"scale": "none"}, {"scale": "1/√d_k"}).high < -0.5
    text = concluded("gradients").text
    assert "what arrives is not less in all, but less even" in text


def test_a_vanishing_gradient_would_be_said():
    def vanishing(own, found):
        return {"first_query": 1e-3 * found["first_query"]} if own.get("scale") == "none" else {}

    text = concluded("gradients", made_up("gradients", vanishing)).text
    assert "what arrives is less in all" in text


def test_alike_gradients_are_no_difference():
    def alike(own, found):
        return {"first_query": 1 + 0.01 * (own["seed"] % 2) * (own["scale"] == "none")} if own["part"] == MODEL else {}

    text = concluded("gradients", made_up("gradients", alike)).text
    assert "without a scale no difference (1 ± " in text


def test_another_softmax_is_seen(monkeypatch):
    plain = gradients.softmax_of
    monkeypatch.setattr(gradients, "softmax_of", lambda scores: plain(0.9 * scores))
    conclusion = concluded("gradients", rerun("gradients", part=DRAWN))
    assert seen_to_be_wrong(conclusion, "by automatic differentiation")
    assert seen_to_be_wrong(conclusion, "the squared norm is its exact expectation")


def test_a_model_that_is_pulled_on_one_side_is_seen():
    def lopsided(own, found):
        return {"imbalance": 0.01} if own["part"] == MODEL else {}

    assert seen_to_be_wrong(concluded("gradients", made_up("gradients", lopsided)), "⟨W_q, ∂W_q⟩ = ⟨W_k, ∂W_k⟩")
