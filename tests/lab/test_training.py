import math

import pytest
import torch

from attnscale import rules
from attnscale.lab.tasks import NOT_ASKED, TASKS, Characters, Recall, _text
from attnscale.lab.training import (
    SCALES,
    Schedule,
    Trained,
    curve_steps,
    held_out_loss,
    one_thread,
    score_summary,
    seeded_model,
    swap_scale,
    trained,
    training,
)
from attnscale.models.text import decode

TASK = TASKS["easy recall"]
SHAPE = {"d_model": 32, "heads": 1, "head_dim": 8}


@pytest.fixture(autouse=True)
def on_one_thread():
    with one_thread():  # as cells run
        yield


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# Tasks


def test_characters_ask_for_the_next_byte_everywhere():
    batch = Characters(length=13).batch(5, generator())
    assert batch.tokens.shape == batch.targets.shape == (5, 13)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    text = bytes(_text()[0].tolist())
    last = batch.targets[:, -1].tolist()
    assert all(bytes([*own.tolist(), byte]) in text for own, byte in zip(batch.tokens, last, strict=True))


def test_held_out_text_is_not_trained_on():
    held_out = Characters(length=200).held_out(7)
    trained_on = decode(_text()[0])
    assert all(decode(own) not in trained_on for own in held_out.tokens)


def test_recall_asks_only_for_pairs_of_the_sequence():
    batch = Recall(pairs=5, rounds=3, keys=11, values=7).batch(13, generator())
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        pairs = dict(zip(tokens[0:10:2], tokens[1:10:2], strict=True))
        asked = [(token, target) for token, target in zip(tokens, targets, strict=True) if target != NOT_ASKED]
        assert len(pairs) == 5
        assert asked == [(key, pairs[key]) for key in tokens[10::2]]
        assert all(sorted(tokens[start : start + 10 : 2]) == sorted(pairs) for start in (10, 20))


def test_a_model_without_attention_does_not_recall():
    task = Recall(pairs=3, keys=8, values=8)
    model = seeded_model(task.vocabulary, seed=0, head_dim=8, layers=0)
    found = trained(model, task, Schedule(steps=100, rate=0.01))
    assert found.final == pytest.approx(task.chance, abs=0.1)


# Runs


def losses(seed=0):
    model = seeded_model(TASK.vocabulary, seed, **SHAPE)
    return [step.loss for step in training(model, TASK, Schedule(5, 0.01, seed))]


def test_a_seed_decides_a_run_and_a_generator_its_batches():
    assert not torch.equal(TASK.batch(3, generator(1)).tokens, TASK.batch(3, generator(2)).tokens)
    assert torch.equal(TASK.held_out(5).tokens, TASK.held_out(5).tokens)
    torch.manual_seed(1)
    first = losses()
    state = torch.get_rng_state()
    assert losses() == first
    assert torch.equal(torch.get_rng_state(), state)
    assert losses(seed=1) != first


def test_the_rate_rises_and_falls_to_zero():
    schedule = Schedule(steps=200, rate=0.3)
    rates = [schedule.rate_at(step) for step in range(201)]
    assert 0 < rates[0] < 0.02
    assert max(rates) == pytest.approx(0.3, rel=0.03)
    assert rates.index(max(rates)) == 19
    assert rates[200] == pytest.approx(0, abs=1e-9)


def test_a_run_that_breaks_down_ends_and_counts_at_its_first_loss():
    model = seeded_model(TASK.vocabulary, 0, **SHAPE)
    found = trained(model, TASK, Schedule(40, 1e20))
    assert len(found.losses) < 40
    assert found.diverged
    assert found.final == found.start == found.curve(40)[-1]
    assert all(map(math.isfinite, found.curve(40)))
    assert Trained((2.0, 9.0), start=3.0, end=8.0).diverged
    assert Trained((2.0, 9.0), start=3.0, end=8.0).final == 8.0
    assert not Trained((2.0, 1.0), start=3.0, end=1.0).diverged


def test_a_curve_is_the_mean_of_each_part():
    found = Trained(tuple(map(float, range(7))), start=9.0, end=1.0)
    assert found.curve(7, points=3) == curve_steps(7, points=3) == [1.0, 3.5, 5.5]
    assert found.curve(7, points=20) == list(range(7))


def test_a_lower_temperature_gives_the_same_weights_larger_scores_and_less_entropy():
    models = [seeded_model(TASK.vocabulary, 0, **SHAPE, layers=1, scale=rules.temperature(tau)) for tau in (1.0, 4.0)]
    weights = [dict(model.named_parameters()) for model in models]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    cold, warm = (score_summary(model, TASK) for model in models)
    assert cold["std"] == pytest.approx(4 * warm["std"], rel=1e-4)
    assert cold["max"] == pytest.approx(4 * warm["max"], rel=1e-4)
    assert cold["entropy_ratio"] < warm["entropy_ratio"]


def test_a_swapped_scale_is_that_of_a_model_made_with_it():
    for scale, rule in SCALES.items():
        model = seeded_model(TASK.vocabulary, 0, **SHAPE, scale="temperature:3")
        swap_scale(model, scale)
        assert held_out_loss(model, TASK) == held_out_loss(seeded_model(TASK.vocabulary, 0, **SHAPE, scale=rule), TASK)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush denormal numbers")
@pytest.mark.parametrize("before", [False, True])
def test_denormal_numbers_are_flushed_inside_the_block_only(before):
    tiny = torch.tensor(torch.finfo(torch.float32).tiny)
    torch.set_flush_denormal(before)
    try:
        with one_thread():
            inside = (tiny / 2).item()
        outside = (tiny / 2).item()
    finally:
        torch.set_flush_denormal(False)
    assert inside == 0
    assert (outside == 0) is before
