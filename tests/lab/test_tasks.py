import math

import pytest
import torch

from attnscale.lab.tasks import NOT_ASKED, TASKS, Characters, Recall, _text
from attnscale.lab.training import Schedule, seeded_model, trained
from attnscale.models.text import decode


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as cells have; two on a busy machine take ten times as long over small matrices
    yield
    torch.set_num_threads(threads)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_characters_ask_for_the_next_byte_everywhere():
    batch = Characters(length=13).batch(5, generator())
    assert batch.tokens.shape == batch.targets.shape == (5, 13)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    text = bytes(_text()[0].tolist())
    assert all(
        bytes([*own.tolist(), last]) in text
        for own, last in zip(batch.tokens, batch.targets[:, -1].tolist(), strict=True)
    )


def test_what_is_held_out_is_not_trained_on():
    held_out = Characters(length=200).held_out(7)
    trained_on = decode(_text()[0])
    assert all(decode(own) not in trained_on for own in held_out.tokens)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_generator_decides_the_batch_and_nothing_else(task):
    one, again, other = (task.batch(3, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(one.tokens, again.tokens)
    assert not torch.equal(one.tokens, other.tokens)
    assert torch.equal(task.held_out(5).tokens, task.held_out(5).tokens)
    assert int(max(one.tokens.max(), one.targets.max())) < task.vocabulary


def test_recall_asks_only_for_what_was_told():
    task = Recall(pairs=5, rounds=3, keys=11, values=7)
    batch = task.batch(13, generator())
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        told = dict(zip(tokens[0:10:2], tokens[1:10:2], strict=True))
        asked = [(token, target) for token, target in zip(tokens, targets, strict=True) if target != NOT_ASKED]
        assert len(told) == 5
        assert asked == [(key, told[key]) for key in tokens[10::2]]
        assert all(sorted(tokens[start : start + 10 : 2]) == sorted(told) for start in (10, 20))


def test_recall_is_learned_by_attending_and_not_by_guessing():
    task = Recall(pairs=3, keys=8, values=8)
    model = seeded_model(task.vocabulary, seed=0, head_dim=64)
    found = trained(model, task, Schedule(steps=200, rate=0.005))
    assert found.final < math.log(3) / 3  # ln 3 is to guess among the values that were told


def test_a_model_that_cannot_attend_does_not_recall():
    task = Recall(pairs=3, keys=8, values=8)
    model = seeded_model(task.vocabulary, seed=0, head_dim=8, layers=0)
    found = trained(model, task, Schedule(steps=100, rate=0.01))
    assert found.final == pytest.approx(task.chance, abs=0.1)
