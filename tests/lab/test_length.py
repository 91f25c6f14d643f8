import math

import pytest
import torch

from attnscale.lab.cell import Cell
from attnscale.lab.experiments import length
from attnscale.lab.experiments.length import RULES, expected_entropy, growth
from attnscale.lab.running import run_cell
from attnscale.rules import constant
from tests.lab.concluding import all_hold, concluded, made_up, quick, rerun, seen_to_be_wrong


def test_entropy_is_its_exact_expectation_under_every_rule():
    assert all_hold(concluded("length"))


def test_entropy_follows_the_context_unless_the_scale_does():
    full = quick("length").where(causal=False)
    share = {rule: growth(full.where(rule=rule), length.TRAINED).mean for rule in RULES}
    assert share["1/√d_k"] == pytest.approx(1, abs=0.02)
    assert 0 < share["log n"] < 0.3 < share["YaRN"] < 0.8
    text = concluded("length").text
    assert "Under 1/√d_k attention dilutes with length" in text
    assert "Under YaRN attention dilutes more slowly" in text


def test_a_causal_model_of_2048_keys_has_the_entropy_of_its_prefixes():
    expected = expected_entropy("1/√d_k", True, 2048)
    assert expected == pytest.approx(math.log(2048) - 1 - 0.5, abs=0.02)
    assert expected_entropy("1/√d_k", False, 2048) == pytest.approx(7.12, abs=0.01)  # were all keys seen by every row
    one = run_cell(Cell("length", 1, {"rule": "1/√d_k", "causal": True, "length": 2048, "seed": 0})).outcome
    assert one["entropy"] == pytest.approx(expected, abs=0.02)


def test_the_mean_over_causal_rows_is_taken_over_all_of_them():
    rows = [length._entropy("log n", keys, 61) for keys in range(2, 62)]
    assert expected_entropy("log n", True, 61) == pytest.approx(sum(rows) / 61, rel=1e-7)


def test_another_growth_makes_another_conclusion():
    def level(own, found):
        return {"entropy": 3.0 + 0.01 * own["seed"]}

    def falling(own, found):
        return {"entropy": 10 - math.log(own["length"]) + 0.01 * own["seed"] * own["length"] ** 0.1}

    assert "Under 1/√d_k attention holds its entropy" in concluded("length", made_up("length", level)).text
    assert "Under 1/√d_k attention sharpens with length" in concluded("length", made_up("length", falling)).text


def test_a_temperature_that_forgot_its_square_is_seen(monkeypatch):
    """YaRN's √(1/t) multiplies q and k both."""
    plain = length.rule_for

    def once(rule, keys):
        if rule != "YaRN":
            return plain(rule, keys)
        some = torch.zeros(1, length.HEAD_DIM)
        return constant(math.sqrt(plain(rule, keys)(some, some)[2] * length.HEAD_DIM**-0.5))

    monkeypatch.setattr(length, "rule_for", once)
    found = rerun("length", rule="YaRN", causal=False)
    monkeypatch.undo()
    assert seen_to_be_wrong(concluded("length", found), "YaRN: entropy of full rows")
