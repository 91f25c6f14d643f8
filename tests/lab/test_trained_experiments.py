"""Experiments that train: conclusions follow the numbers; the quick grids themselves, trained, are marked slow."""

import math

import pytest

from attnscale.lab.experiment import Heatmap
from attnscale.lab.experiments.ablation import REFERENCE, VARIANTS, WITHOUT
from attnscale.lab.experiments.temperature import MULTIPLES
from attnscale.lab.experiments.trained import BUNDLED, OTHERS, bundled_loss
from attnscale.lab.outcomes import Outcomes
from tests.lab.conclusions import concluded, failed, made_up, quick, sketch

# ablation


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


def test_equal_losses_are_no_difference():
    conclusion = concluded("ablation", ablation_with(lambda own: 1.0))
    assert "worse" not in conclusion.text
    assert conclusion.text.count("no difference at") == len(VARIANTS) - 1 + 2  # and at both ends
    assert any("worse at d_k = 256" in statement for statement in failed(conclusion))


def test_a_better_variant_is_named():
    found = ablation_with(lambda own: 1.5 if own["variant"] == "QK-norm" else 2.0)
    assert "QK-norm better at 256 (-0.5" in concluded("ablation", found).text


def test_one_seed_decides_nothing():
    text = concluded("ablation", Outcomes(sketch("ablation").where(seed=0).cells)).text
    assert "unscaled undecided at 8 (" in text
    assert "worse" not in text


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


# temperature


def test_before_training_the_spread_is_inverse_to_the_temperature():
    found = sketch("temperature")
    spreads = [found.band("spread_before", multiple=multiple).mean * multiple for multiple in MULTIPLES]
    assert spreads == pytest.approx([spreads[2]] * 5, rel=0.05)
    entropies = [found.band("entropy_before", multiple=multiple).mean for multiple in MULTIPLES]
    assert entropies == sorted(entropies)


@pytest.mark.slow
def test_a_quarter_of_the_temperature_is_too_low():
    cost = quick("temperature").difference("final", {"multiple": 0.25}, {"multiple": 1.0})
    assert cost.low > 0
    assert "worse at ¼√d_k (+0." in concluded("temperature").text


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


def test_a_better_temperature_is_named():
    def better(own, found):
        return {"final": 1.0 - 0.3 * (own["multiple"] == 2.0) + 0.01 * own["seed"]}

    conclusion = concluded("temperature", made_up(sketch("temperature"), better))
    assert "the lowest mean loss is at τ = 2√d_k." in conclusion.text
    assert "better at 2√d_k (-0.3" in conclusion.text
    assert any("no temperature is better" in statement for statement in failed(conclusion))


# trained


def test_the_bundled_model_does_best_with_its_own_scale():
    kept, without, by_dim = (bundled_loss(scale) for scale in ("1/√d_k", "none", "1/d_k"))
    assert kept < without < by_dim
    assert by_dim - kept > 1 > 0.5 > without - kept


def test_parts_of_the_held_out_text_differ():
    assert bundled_loss("1/√d_k", 0) != bundled_loss("1/√d_k", 1)
    assert bundled_loss("1/√d_k", 0) == pytest.approx(bundled_loss("1/√d_k", 8))


@pytest.mark.parametrize(("once", "holds"), [(0.1, True), (0.9, False), (0.5, None)])
def test_a_trained_model_is_compared_with_an_untrained_one(once, holds):
    def change(own, found):
        if own["part"] == BUNDLED:
            return {}
        same = {f"1/√d_k {when}": 1.0 for when in ("at once", "after more training", "from the start")}
        return {**same, "none at once": 1 + once + 0.01 * (own["seed"] - 1), "none from the start": 2.0}

    conclusion = concluded("trained", made_up(sketch("trained"), change))
    assert [check.holds for check in conclusion.checks[1:]] == [holds, holds]


def test_a_bundled_model_that_needs_no_scale_fails_the_check():
    def indifferent(own, found):
        return {f"{scale} at once": 1.0 + 0.01 * own["seed"] for scale in ("1/√d_k", *OTHERS)}

    assert "does best" in failed(concluded("trained", made_up(sketch("trained"), indifferent)))[0]
