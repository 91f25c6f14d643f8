import pytest

from attnscale.lab.catalogue import EXPERIMENTS
from attnscale.lab.cell import Cell
from attnscale.lab.experiments.ablation import REFERENCE, VARIANTS, WITHOUT
from attnscale.lab.outcomes import Outcomes
from attnscale.lab.running import run_cell
from tests.lab.concluding import concluded, failing, made_up, quick


def test_without_scaling_training_is_worse_where_d_k_is_large_and_only_there():
    conclusion = concluded("ablation")
    assert not failing(conclusion)
    assert "unscaled no difference at 8 (" in conclusion.text
    assert "worse at 256 (+0." in conclusion.text
    assert conclusion.text.startswith("Training without scaling, against 1/√d_k: easy recall worse at d_k = 256 (+0.")
    lost = quick("ablation").difference("final", {"variant": WITHOUT}, {"variant": REFERENCE}, head_dim=256)
    assert lost.low > 0.2


def test_the_start_explains_it():
    at = quick("ablation").where(head_dim=256)
    assert at.band("gain_before", variant=WITHOUT).high < at.band("gain_before", variant=REFERENCE).low
    assert at.band("entropy_before", variant=WITHOUT).high < 0.4
    assert at.band("entropy_before", variant=REFERENCE).low > 0.7


def test_where_all_are_alike_nothing_is_said_to_be_worse():
    conclusion = concluded("ablation", made_up("ablation", lambda own, found: {"final": 1.0 + 0.1 * own["seed"]}))
    assert "worse" not in conclusion.text
    assert conclusion.text.count("no difference at") == len(VARIANTS) - 1 + 2  # and both ends
    assert any("worse at d_k = 256" in statement for statement in failing(conclusion))


def test_what_is_better_is_said_to_be_better():
    def better(own, found):
        gain = 0.5 if own["variant"] == "QK-norm" else 0.0
        return {"final": 2.0 - gain + 0.01 * own["seed"]}

    assert "QK-norm better at 256 (-0.5" in concluded("ablation", made_up("ablation", better)).text


def test_one_seed_tells_nothing():
    text = concluded("ablation", Outcomes(quick("ablation").where(seed=0).cells)).text
    assert "unscaled undecided at 8 (" in text
    assert "worse" not in text


def test_runs_that_diverged_are_counted():
    def diverge(own, found):
        return {"diverged": own["variant"] == WITHOUT and own["seed"] == 1}

    conclusion = concluded("ablation", made_up("ablation", diverge))
    assert "2 of 24 runs diverged" in conclusion.text
    assert sum(row[conclusion.tables[0].columns.index("diverged")] for row in conclusion.tables[0].rows) == 2


def test_each_variant_is_taken_at_its_best_rate():
    def settings(own, found):
        return {"final": 1.0 + 0.001 * own["seed"]}

    cells = made_up("ablation", settings).cells
    slower = [({**own, "rate": 0.5}, {**found, "final": found["final"] + 3.0}) for own, found in cells]
    conclusion = concluded("ablation", Outcomes([*cells, *slower]))
    assert {row[2] for row in conclusion.tables[0].rows} == {0.005}
    assert any(plot.title.startswith("Final loss against rate") for plot in conclusion.plots)


def test_a_cell_is_the_same_in_another_process(tmp_path):
    from attnscale.lab.executors import executor_for

    cell = EXPERIMENTS["ablation"].cells(quick=True)[-1]
    with executor_for("pool", 1, tmp_path) as pool:
        there = pool.submit(run_cell, cell).result().outcome
    assert there == next(found for own, found in quick("ablation") if own == cell.settings)
    assert there != run_cell(Cell(cell.experiment, 1, {**cell.settings, "seed": 99})).outcome


@pytest.mark.parametrize("name", ["ablation", "temperature", "growth"])
def test_the_full_grid_covers_what_was_asked(name):
    settings = [cell.settings for cell in EXPERIMENTS[name].cells()]
    asked = {
        "ablation": {"head_dim": {8, 32, 128, 256}, "task": {"characters", "recall"}, "variant": set(VARIANTS)},
        "temperature": {"multiple": {0.25, 0.5, 1.0, 2.0, 4.0}, "task": {"characters", "recall"}},
        "growth": {"fix": {"plain", "QK-norm", "QK-Clip"}, "rate": {3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1}},
    }
    assert all({own[setting] for own in settings} == values for setting, values in asked[name].items())
    assert len({own["seed"] for own in settings}) >= 5
