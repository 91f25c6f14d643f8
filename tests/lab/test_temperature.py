import math

import pytest

from attnscale.lab.experiments.temperature import MULTIPLES
from attnscale.lab.result import Heatmap
from tests.lab.concluding import concluded, failing, made_up, quick


def test_before_training_the_spread_is_the_inverse_of_the_temperature():
    found = quick("temperature")
    spreads = [found.band("spread_before", multiple=multiple).mean * multiple for multiple in MULTIPLES]
    assert spreads == pytest.approx([spreads[2]] * 5, rel=0.05)
    entropies = [found.band("entropy_before", multiple=multiple).mean for multiple in MULTIPLES]
    assert entropies == sorted(entropies)


def test_a_quarter_of_the_temperature_is_too_cold():
    cost = quick("temperature").difference("final", {"multiple": 0.25}, {"multiple": 1.0})
    assert cost.low > 0
    assert "worse at ¼√d_k (+0." in concluded("temperature").text


def test_patterns_are_of_trained_heads():
    patterns = [plot for plot in concluded("temperature").plots if isinstance(plot, Heatmap)]
    assert len(patterns) == len(MULTIPLES)
    for plot in patterns:
        for query, row in enumerate(plot.values):
            assert sum(row) == pytest.approx(1, abs=0.01)
            assert not any(row[query + 1 :])


@pytest.mark.parametrize(
    ("power", "verdict", "holds"),
    [(0.0, "training undoes the temperature", True), (-0.5, "training undoes 50% of it", True),
     (-1.0, "training does not undo it", False), (-1.5, "training widens what it did", False)],
)  # fmt: skip
def test_what_training_does_to_a_temperature_is_told_from_the_spread_after(power, verdict, holds):
    def spread(own, found):
        noise = math.exp(0.01 * (-1) ** own["seed"] * math.log(own["multiple"]))
        return {"spread_before": 1 / own["multiple"] * noise, "spread_after": own["multiple"] ** power * noise}

    conclusion = concluded("temperature", made_up("temperature", spread))
    assert verdict in conclusion.text
    assert any("undoes part" in statement for statement in failing(conclusion)) is not holds


def test_a_better_temperature_is_said_to_be_better():
    def better(own, found):
        return {"final": 1.0 - 0.3 * (own["multiple"] == 2.0) + 0.01 * own["seed"]}

    conclusion = concluded("temperature", made_up("temperature", better))
    assert "the lowest mean loss is at τ = 2√d_k; against √d_k" in conclusion.text
    assert "better at 2√d_k (-0.3" in conclusion.text
    assert any("no temperature is better" in statement for statement in failing(conclusion))


def test_runs_that_diverged_are_counted():
    text = concluded("temperature", made_up("temperature", lambda own, found: {"diverged": own["seed"] == 2})).text
    assert "5 of 20 runs diverged" in text
