import logging
import math

import pytest
import torch

from attnscale import Monitor, rules
from attnscale.lab.experiments.ablation import VARIANTS
from attnscale.lab.tasks import TASKS
from attnscale.lab.training import (
    Schedule,
    Trained,
    curve_steps,
    held_out_loss,
    score_summary,
    seeded_model,
    trained,
    training,
    without_alarms,
)

TASK = TASKS["easy recall"]
SHAPE = {"d_model": 32, "heads": 1, "head_dim": 8}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def losses(seed=0, monitor=False, **schedule):
    model = seeded_model(TASK.vocabulary, seed, **SHAPE)
    watching = Monitor(model, every=3) if monitor else None
    return [step.loss for step in training(model, TASK, Schedule(5, 0.01, seed, **schedule), watching)]


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_a_seed_decides_a_run_whatever_was_drawn_before(optimiser):
    torch.manual_seed(1)
    first = losses(optimiser=optimiser)
    state = torch.get_rng_state()
    assert losses(optimiser=optimiser) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert losses(seed=1, optimiser=optimiser) != first


def test_watching_a_run_does_not_change_it():
    assert losses(monitor=True) == losses()


def test_variants_begin_with_the_same_weights():
    models = [seeded_model(TASK.vocabulary, 3, scale=scale, **SHAPE) for scale in VARIANTS.values()]
    shared = set.intersection(*(set(model.state_dict()) for model in models))
    assert "blocks.1.attention.query.weight" in shared
    assert all(
        torch.equal(model.state_dict()[name], models[0].state_dict()[name]) for model in models for name in shared
    )


def test_the_rate_rises_and_falls_to_nothing():
    schedule = Schedule(steps=200, rate=0.3)
    rates = [schedule.rate_at(step) for step in range(201)]
    assert 0 < rates[0] < 0.02
    assert max(rates) == pytest.approx(0.3, rel=0.03)
    assert rates.index(max(rates)) == 19
    assert rates[200] == pytest.approx(0, abs=1e-9)


def test_a_run_that_breaks_ends_there_and_counts_as_having_learned_nothing():
    model = seeded_model(TASK.vocabulary, 0, **SHAPE)
    found = trained(model, TASK, Schedule(40, 1e20, optimiser="sgd"))
    assert len(found.losses) < 40
    assert found.diverged
    assert found.final == found.start
    assert found.curve(40)[-1] == found.start
    assert all(map(math.isfinite, found.curve(40)))


def test_a_run_that_ends_worse_than_it_began_diverged_though_its_loss_is_a_number():
    assert Trained((2.0, 9.0), start=3.0, end=8.0, records=()).diverged
    assert Trained((2.0, 9.0), start=3.0, end=8.0, records=()).final == 8.0
    assert not Trained((2.0, 1.0), start=3.0, end=1.0, records=()).diverged


def test_a_curve_is_the_mean_of_each_part():
    found = Trained(tuple(map(float, range(7))), start=9.0, end=1.0, records=())
    assert found.curve(7, points=3) == [0.5, 2.5, 5.0]
    assert curve_steps(7, points=3) == [0.5, 2.5, 5.0]
    assert found.curve(7, points=20) == list(range(7))


def test_records_are_of_the_steps_before_they_were_made():
    model = seeded_model(TASK.vocabulary, 0, **SHAPE)
    with torch.no_grad():
        first = model.blocks[0].attention.query.weight.clone()
    steps = []
    for step in training(model, TASK, Schedule(4, 0.01), Monitor(model, every=2, rows=None)):
        held_out_loss(model, TASK)  # between steps nothing is watched
        steps.append(step)
    assert [step.record is not None for step in steps] == [True, False, True, False]
    assert {layer.rows for step in steps if step.record for layer in step.record.layers.values()} == {16 * 17}
    assert not torch.equal(first, model.blocks[0].attention.query.weight)


def test_scores_are_summarised_as_softmax_sees_them():
    cold, warm = (
        score_summary(seeded_model(TASK.vocabulary, 0, **SHAPE, layers=1, scale=rules.temperature(tau)), TASK)
        for tau in (1.0, 4.0)
    )
    assert cold["std"] == pytest.approx(4 * warm["std"], rel=1e-4)
    assert cold["max"] == pytest.approx(4 * warm["max"], rel=1e-4)
    assert cold["entropy_ratio"] < warm["entropy_ratio"]


def test_alarms_are_silent_only_meanwhile(caplog):
    logger = logging.getLogger("attnscale.acting.clip")
    with without_alarms():
        logger.warning("silent")
    logger.warning("heard")
    assert caplog.messages == ["heard"]
