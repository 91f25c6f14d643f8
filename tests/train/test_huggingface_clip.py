"""QKClipCallback in real runs of the Hugging Face Trainer."""

import json

import torch

from attnscale.train import QKClipCallback, ScoreCallback, read_log

from .trainers import LAYERS, trainer

THRESHOLD = 0.002


def train(folder, *callbacks, **options):
    run = trainer(folder, callbacks[0], learning_rate=1e-2, **options)
    for callback in callbacks[1:]:
        run.add_callback(callback)
    return run


def largest(path):
    """The largest score at each step of a log."""
    return [max(layer.whole("max") for layer in record.layers.values()) for record in read_log(path).records]


def test_scores_are_held_after_every_step_of_the_optimiser(tmp_path):
    callback, scores = QKClipCallback(threshold=THRESHOLD), ScoreCallback(every=1, rows=None, sinks=[tmp_path / "log"])
    train(tmp_path, callback, scores).train()
    assert callback.clip.steps == 8
    assert callback.clip.last.heads
    free = ScoreCallback(every=1, rows=None, sinks=[tmp_path / "free"])
    train(tmp_path / "other", free).train()
    held, grown = largest(tmp_path / "log"), largest(tmp_path / "free")
    assert held[0] == grown[0] > THRESHOLD
    assert held[-1] < grown[-1] / 2


def test_a_run_under_the_threshold_ends_as_it_does_without_it(tmp_path):
    clipped, plain = train(tmp_path, QKClipCallback()), train(tmp_path, ScoreCallback(every=10**6))
    kinds = [type(module) for module in clipped.model.modules()]
    clipped.train()
    plain.remove_callback(ScoreCallback)
    plain.train()
    assert all(torch.equal(a, b) for a, b in zip(clipped.model.parameters(), plain.model.parameters(), strict=True))
    assert [type(module) for module in clipped.model.modules()] == kinds


def test_a_resumed_run_goes_on_with_its_threshold_and_count(tmp_path):
    train(tmp_path, QKClipCallback(threshold=THRESHOLD)).train()
    checkpoint = tmp_path / "out" / "checkpoint-5"
    saved = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["stateful_callbacks"][
        "QKClipCallback"
    ]
    assert saved["attributes"]["remembered"] == {"steps": 5, "threshold": THRESHOLD}
    again = QKClipCallback()
    train(tmp_path, again).train(resume_from_checkpoint=str(checkpoint))
    assert (again.clip.steps, again.clip.threshold) == (8, THRESHOLD)
    assert {head.layer for head in again.clip.last.heads} <= {*LAYERS}
