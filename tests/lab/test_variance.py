import math

import pytest
import torch

from attnscale.lab.experiments import variance
from tests.lab.concluding import all_hold, concluded, made_up, quick, rerun, seen_to_be_wrong


def test_the_variance_of_a_dot_product_is_its_closed_form():
    assert all_hold(concluded("variance"))
    found = quick("variance")
    for name in ("normal", "uniform", "signs", "Laplace"):
        assert found.band("variance", case=name, head_dim=64).mean == pytest.approx(64, rel=0.05)
    # a textbook's exercise: the standard deviation at d_k = 512 is 22.6
    assert math.sqrt(variance.CASES["normal"].variance(512)) == pytest.approx(22.627, abs=1e-3)


def test_components_of_another_variance_are_seen(monkeypatch):
    monkeypatch.setitem(variance.DRAWS, "uniform", lambda *shape: 1.8 * (2 * torch.rand(*shape) - 1))
    conclusion = concluded("variance", rerun("variance", case="uniform"))
    assert seen_to_be_wrong(conclusion, "uniform: Var(q·k) = 1 d_k")
    assert "not confirmed to equal d_k" in conclusion.text


def test_another_power_of_d_k_makes_another_conclusion():
    def squared(own, found):
        return {"variance": found["variance"] * own["head_dim"], "scaled_variance": found["variance"]}

    assert "to the power 0.9" in concluded("variance").text
    assert "to the power 1.9" in concluded("variance", made_up("variance", squared)).text


def test_one_seed_confirms_nothing():
    conclusion = concluded("variance", quick("variance").where(seed=0))
    assert not any(check.holds for check in conclusion.checks)
    assert "cannot be told from one seed" in conclusion.checks[0].evidence
