from functools import lru_cache

import pytest

from attnscale.lab.catalogue import EXPERIMENTS
from attnscale.lab.experiments.trained import BUNDLED, OTHERS, OWN, bundled_loss
from attnscale.lab.outcomes import Outcomes
from attnscale.lab.running import run_cell
from attnscale.lab.swapping import swap_scale, swapped
from attnscale.lab.tasks import TASKS
from attnscale.lab.training import held_out_loss, seeded_model
from tests.lab.concluding import concluded, failing, made_up


@lru_cache
def quick():
    """The quick grid; of models trained here, six seconds each, one seed stands for all: what they tell is made up."""
    found, first = [], {}
    for cell in EXPERIMENTS["trained"].cells(quick=True):
        own, head_dim = cell.settings, cell.settings.get("head_dim")
        if own["part"] == BUNDLED or head_dim not in first:
            first[head_dim] = run_cell(cell).outcome
        found.append((own, first[head_dim]))
    return Outcomes(found)


def test_the_bundled_model_does_best_with_the_scale_it_was_trained_with():
    found = quick().where(part=BUNDLED)
    kept, without, by_dim = (found.band(f"{scale} at once").mean for scale in ("1/√d_k", "none", "1/d_k"))
    assert kept < without < by_dim
    assert by_dim - kept > 1 > 0.5 > without - kept
    assert not any("bundled" in statement for statement in failing(concluded("trained", quick())))


def test_the_conclusion_follows_the_losses_whichever_way_they_fall():
    def costs(once, fresh):
        def change(own, found):
            if own["part"] == BUNDLED:
                return {}
            low = {f"1/√d_k {when}": 1.0 for when in ("at once", "learning on", "from the start")}
            noise = 0.01 * own["seed"]
            return {**low, "none at once": 1 + once + noise, "none from the start": 1 + fresh + noise}

        return concluded("trained", made_up("trained", change, quick())).text

    assert "At d_k = 16, 256 yes" in costs(0.1, 1.0)
    assert "At d_k = 16, 256 no" in costs(0.9, 1.0)
    assert "At d_k = 16, 256 undecided" in costs(0.5, 1.0)


def test_a_bundled_model_that_needs_no_scale_would_be_seen():
    def indifferent(own, found):
        return {f"{scale} at once": 1.0 + 0.01 * own["seed"] for scale in ("1/√d_k", *OTHERS)}

    assert "does best" in failing(concluded("trained", made_up("trained", indifferent, quick())))[0]


def test_a_swapped_scale_is_another_model_and_comes_back():
    task = TASKS["easy recall"]
    model = seeded_model(task.vocabulary, 0, d_model=32, heads=1, head_dim=64, scale="inverse_sqrt")
    before = held_out_loss(model, task)
    with swapped(model, "none"):
        without = held_out_loss(model, task)
    assert held_out_loss(model, task) == before != without
    swap_scale(model, "none")
    assert held_out_loss(model, task) == without


def test_parts_of_the_text_held_out_are_different_ones():
    assert bundled_loss("1/√d_k", 0) != bundled_loss("1/√d_k", 1)
    assert bundled_loss("1/√d_k", 0) == pytest.approx(bundled_loss("1/√d_k", 8))
    assert len(quick().where(part=OWN)) == 2 * len(quick().where(part=BUNDLED))
