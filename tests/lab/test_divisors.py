import pytest

from attnscale.lab.experiments import divisors
from tests.lab.concluding import all_hold, concluded, made_up, quick, rerun, seen_to_be_wrong


def test_variance_entropy_and_gradients_are_their_closed_forms():
    assert all_hold(concluded("divisors"))


def test_only_the_square_root_keeps_the_variance():
    found = quick("divisors")
    powers = {divisor: divisors.exponent(found.where(divisor=divisor), "variance").mean for divisor in divisors.RULES}
    assert powers == pytest.approx({"none": 1, "√d_k": 0, "d_k": -1}, abs=0.02)


def test_under_d_k_the_output_does_not_follow_the_query():
    found = quick("divisors").where(head_dim=256)
    assert found.band("follows", divisor="d_k").mean == pytest.approx(1 / 256, rel=0.2)  # 1 − exp(−σ²), σ² = 1/d_k
    assert found.band("follows", divisor="√d_k").mean == pytest.approx(0.63, abs=0.05)
    assert "attention is an average whatever is asked" in concluded("divisors").text


def test_where_the_output_follows_the_query_the_conclusion_says_so():
    text = concluded("divisors", made_up("divisors", lambda own, found: {"follows": 0.6})).text
    assert "attention still looks at the query" in text
    assert "average" not in text


def test_alike_gradients_are_no_difference():
    noise = {seed: 1 + 0.01 * (-1) ** seed for seed in range(8)}

    def alike(own, found):
        return {"query_gradient": noise[own["seed"]] if own["divisor"] == "d_k" else 1.0}

    assert "gradient on queries is no difference" in concluded("divisors", made_up("divisors", alike)).text


def test_the_wrong_divisor_is_seen(monkeypatch):
    monkeypatch.setitem(divisors.RULES, "√d_k", "constant:0.2")
    conclusion = concluded("divisors", rerun("divisors", divisor="√d_k"))
    assert seen_to_be_wrong(conclusion, "divisor √d_k: Var(scores)")
    assert seen_to_be_wrong(conclusion, "divisor √d_k: H/ln n")
