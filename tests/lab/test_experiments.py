"""Experiments: numbers match theory, errors are noticed, and conclusions follow the numbers.

The quick grids of experiments that train are marked slow; their conclusions are tested on two steps of training.
"""

import math
from functools import lru_cache

import numpy as np
import pytest

from attnscale.lab.experiment import Cell, Heatmap
from attnscale.lab.experiments import EXPERIMENTS, divisors, gradients, saturation
from attnscale.lab.experiments.ablation import REFERENCE, VARIANTS, WITHOUT
from attnscale.lab.experiments.temperature import MULTIPLES
from attnscale.lab.experiments.trained import BUNDLED, MOMENTS, OTHERS, bundled_loss
from attnscale.lab.outcomes import Outcomes
from attnscale.lab.sweep import run_cell

CLOSED_FORMS = ("variance", "saturation", "divisors", "gradients", "initialisation", "length")


@lru_cache
def quick(name):
    """Run the quick grid of an experiment."""
    cells = EXPERIMENTS[name].cells(quick=True)
    return Outcomes([(cell.settings, run_cell(cell).outcome) for cell in cells])


@lru_cache
def sketch(name):
    """Run the quick grid of an experiment that trains with one seed and three steps, as if each seed gave the same."""
    found, outcomes = [], {}
    for cell in EXPERIMENTS[name].cells(quick=True):
        settings = {setting: value for setting, value in cell.settings.items() if setting != "seed"}
        short = settings | {"seed": 0} | ({"steps": 3} if "steps" in settings else {})
        key = str(short)
        if key not in outcomes:
            outcomes[key] = run_cell(Cell(name, 1, short)).outcome
        found.append((cell.settings, outcomes[key]))
    return Outcomes(found)


def made_up(outcomes, change):
    """Return the outcomes with what change(settings, outcome) gives in their place."""
    return Outcomes([(own, {**found, **change(dict(own), found)}) for own, found in outcomes])


def concluded(name, outcomes=None):
    return EXPERIMENTS[name].conclude(outcomes or quick(name))


def failed(conclusion):
    return [check.statement for check in conclusion.checks if check.holds is False]


# Experiments without training


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_every_check_passes(name):
    conclusion = concluded(name)
    assert not failed(conclusion)
    assert f"All {len(conclusion.checks)} checks pass." in conclusion.text


@pytest.mark.parametrize(
    ("name", "where", "measure", "statement"),
    [
        ("variance", {"case": "uniform"}, "variance", "uniform: Var(q·k) = 1 d_k"),
        ("divisors", {"part": "along d_k", "divisor": "√d_k"}, "variance", "by √d_k, Var(scores) matches theory"),
        ("saturation", {"part": saturation.MANY, "keys": 1024}, "entropy_ratio", "entropy over 1024 Gaussian scores"),
        ("gradients", {"part": gradients.NAMED}, gradients.UNIFORM, "by automatic differentiation"),
        ("initialisation", {"scheme": "orthogonal"}, "uncalibrated", "orthogonal: the calibrated scale"),
        ("length", {"rule": "YaRN", "causal": False}, "entropy", "YaRN: entropy over Gaussian keys"),
    ],
)
def test_a_measurement_that_is_off_fails_its_check_and_is_named_in_the_text(name, where, measure, statement):
    def off(own, found):
        return {measure: np.multiply(1.2, found[measure]).tolist()} if where.items() <= own.items() else {}

    conclusion = concluded(name, made_up(quick(name), off))
    assert any(statement in each for each in failed(conclusion))
    assert "Failed: " in conclusion.text
    assert all(each in conclusion.text for each in failed(conclusion))


def test_another_power_of_d_k_is_reported():
    def squared(own, found):
        return {"variance": found["variance"] * own["head_dim"], "scaled_variance": found["variance"]}

    assert "to the power 0.9" in concluded("variance").text
    assert "to the power 1.9" in concluded("variance", made_up(quick("variance"), squared)).text


def test_without_a_divisor_more_gradient_reaches_the_median_query_and_is_shared_less_evenly():
    assert "the gradient on the median query is larger for 4 of 5 shapes" in concluded("divisors").text
    for at in quick("divisors").where(part=divisors.SHAPES).groups("head_dim", "keys").values():
        assert at.difference("lower_half", {"divisor": "none"}, {"divisor": "√d_k"}).high < -0.1
    less = made_up(quick("divisors"), lambda own, _: {"median_query": 0.5 if own["divisor"] == "none" else 1.0})
    assert "larger for 0 of 5 shapes" in concluded("divisors", less).text


def test_without_a_scale_more_gradient_arrives_less_evenly_and_a_vanishing_one_is_reported():
    models = quick("gradients").where(part=gradients.MODEL, head_dim=128)
    none, root, by_dim = (models.band("first_query", scale=scale) for scale in ("none", "1/√d_k", "1/d_k"))
    assert none.low > 3 * root.high
    assert by_dim.high < 0.2 * root.low
    assert models.difference("lower_half", {"scale": "none"}, {"scale": "1/√d_k"}).high < -0.1
    text = concluded("gradients").text
    assert "Without a scale more gradient reaches the first layer's queries at d_k = 128" in text
    assert "is shared less evenly" in text

    def vanishing(own, found):
        return {"on_queries": 1e-3 * found["on_queries"]} if own.get("scale") == "none" else {}

    text = concluded("gradients", made_up(quick("gradients"), vanishing)).text
    assert "Without a scale less gradient reaches the first layer's queries" in text


@pytest.mark.parametrize(
    ("entropy", "said"),
    [
        (lambda own: 3.0 + 0.01 * own["seed"], "entropy stays the same"),
        (
            lambda own: 10 - math.log(own["length"]) + 0.01 * own["seed"] * own["length"] ** 0.1,
            "attention becomes sharper with length",
        ),
    ],
)
def test_a_constant_and_a_falling_entropy_are_reported(entropy, said):
    found = made_up(quick("length"), lambda own, _: {"entropy": entropy(own)})
    assert f"Under 1/√d_k {said}" in concluded("length", found).text


# Ablation


@pytest.mark.slow
def test_without_a_scale_training_is_worse_only_where_d_k_is_large():
    conclusion = concluded("ablation")
    assert not failed(conclusion)
    assert conclusion.text.startswith("Loss without a scale, against 1/√d_k: easy recall worse at d_k = 256 (+0.")
    lost = quick("ablation").difference("final", {"variant": WITHOUT}, {"variant": REFERENCE}, head_dim=256)
    assert lost.low > 0.2


def test_a_short_ablation_trains_every_variant_and_an_unscaled_model_starts_with_lower_entropy():
    at = sketch("ablation").where(head_dim=256)
    assert set(at.values("variant")) == set(VARIANTS)
    assert at.band("gain_before", variant=WITHOUT).mean < at.band("gain_before", variant=REFERENCE).mean
    assert at.band("entropy_before", variant=WITHOUT).mean < 0.4
    assert at.band("entropy_before", variant=REFERENCE).mean > 0.7


def ablation_with(final):
    return made_up(sketch("ablation"), lambda own, found: {"final": final(own) + 0.01 * own["seed"]})


def test_equal_losses_are_no_difference_and_a_better_variant_is_named():
    conclusion = concluded("ablation", ablation_with(lambda own: 1.0))
    assert "worse" not in conclusion.text
    assert conclusion.text.count("no difference at") == len(VARIANTS) - 1 + 2  # and at both ends
    assert any("worse at d_k = 256" in statement for statement in failed(conclusion))
    found = ablation_with(lambda own: 1.5 if own["variant"] == "QK-norm" else 2.0)
    assert "QK-norm better at 256 (-0.5" in concluded("ablation", found).text


def test_each_variant_counts_at_its_best_rate():
    cells = ablation_with(lambda own: 1.0).cells
    slower = [({**own, "rate": 0.5}, {**found, "final": found["final"] + 3.0}) for own, found in cells]
    conclusion = concluded("ablation", Outcomes([*cells, *slower]))
    assert {row[2] for row in conclusion.tables[0].rows} == {0.005}


@pytest.mark.parametrize(
    ("name", "where", "said"),
    [("ablation", {"variant": WITHOUT, "seed": 1}, "2 of 24 runs diverged."), ("temperature", {"seed": 2}, "5 of 20")],
)
def test_runs_that_diverged_are_counted(name, where, said):
    found = made_up(sketch(name), lambda own, _: {"diverged": where.items() <= own.items()})
    assert said in concluded(name, found).text


# Temperature


def test_before_training_the_spread_is_inverse_to_the_temperature():
    found = sketch("temperature")
    spreads = [found.band("spread_before", multiple=multiple).mean * multiple for multiple in MULTIPLES]
    assert spreads == pytest.approx([spreads[2]] * 5, rel=0.05)
    entropies = [found.band("entropy_before", multiple=multiple).mean for multiple in MULTIPLES]
    assert entropies == sorted(entropies)


@pytest.mark.slow
def test_a_quarter_of_the_temperature_is_too_low():
    assert quick("temperature").difference("final", {"multiple": 0.25}, {"multiple": 1.0}).low > 0
    assert "worse at ¼√d_k (+0." in concluded("temperature").text


def test_a_better_temperature_is_named():
    found = made_up(sketch("temperature"), lambda own, _: {"final": 0.7 + 0.3 * (own["multiple"] != 2) + own["seed"]})
    conclusion = concluded("temperature", found)
    assert "the lowest mean loss is at τ = 2√d_k." in conclusion.text
    assert "better at 2√d_k (-0.3" in conclusion.text
    assert any("no temperature is better" in statement for statement in failed(conclusion))


def test_patterns_are_causal_weights():
    patterns = [plot for plot in concluded("temperature", sketch("temperature")).plots if isinstance(plot, Heatmap)]
    assert len(patterns) == len(MULTIPLES)
    for plot in patterns:
        for query, row in enumerate(plot.values):
            assert sum(row) == pytest.approx(1, abs=0.01)
            assert not any(row[query + 1 :])


@pytest.mark.parametrize(
    ("power", "said", "holds"),
    [(0.0, "training undoes 100% of the temperature", True), (-0.5, "training undoes 50% of the temperature", True),
     (-1.0, "undecided whether training undoes", None), (-1.5, "training strengthens the temperature", False)],
)  # fmt: skip
def test_the_effect_of_training_is_read_from_the_spread_after(power, said, holds):
    def spread(own, found):
        noise = math.exp(0.01 * (-1) ** own["seed"] * math.log(own["multiple"]))
        return {"spread_before": 1 / own["multiple"] * noise, "spread_after": own["multiple"] ** power * noise}

    conclusion = concluded("temperature", made_up(sketch("temperature"), spread))
    assert said in conclusion.text
    assert [check.holds for check in conclusion.checks if "undoes part" in check.statement] == [holds]


# Trained


def test_the_bundled_model_does_best_with_its_own_scale_and_parts_of_the_text_differ():
    kept, without, by_dim = (bundled_loss(scale) for scale in ("1/√d_k", "none", "1/d_k"))
    assert kept < without < by_dim
    assert by_dim - kept > 1 > 0.5 > without - kept
    assert bundled_loss("1/√d_k", 1) != kept == pytest.approx(bundled_loss("1/√d_k", 8))


@pytest.mark.parametrize(("once", "holds"), [(0.1, True), (0.9, False), (0.5, None)])
def test_a_trained_model_is_compared_with_an_untrained_one(once, holds):
    def change(own, found):
        if own["part"] == BUNDLED:
            return {}
        same = {f"1/√d_k {when}": 1.0 for when in MOMENTS}
        return {**same, "none at once": 1 + once + 0.01 * (own["seed"] - 1), "none from the start": 2.0}

    conclusion = concluded("trained", made_up(sketch("trained"), change))
    assert [check.holds for check in conclusion.checks[1:]] == [holds, holds]


def test_a_bundled_model_that_needs_no_scale_fails_the_check():
    def indifferent(own, found):
        return {f"{scale} at once": 1.0 + 0.01 * own["seed"] for scale in ("1/√d_k", *OTHERS)}

    assert "does best" in failed(concluded("trained", made_up(sketch("trained"), indifferent)))[0]
