"""LightningQKClipCallback in real runs of the Lightning Trainer."""

import pytest
import torch

from attnscale.train import LightningQKClipCallback, LightningScoreCallback

from .trainers import Module, fit

pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")
THRESHOLD = 0.5


def test_scores_are_held_after_every_step_of_the_optimiser_and_nothing_is_left(tmp_path):
    callback = LightningQKClipCallback(threshold=THRESHOLD)
    trainer, module = fit(tmp_path, callback, 5)
    assert callback.clip.steps == trainer.global_step == 5
    assert {head.layer for head in callback.clip.last.heads} <= {
        "model.blocks.0.attention",
        "model.blocks.1.attention",
    }
    assert [type(each) for each in module.modules()] == [type(each) for each in Module().modules()]


def test_a_run_under_the_threshold_ends_as_it_does_without_it(tmp_path):
    _, clipped = fit(tmp_path, LightningQKClipCallback(threshold=100.0), 4)
    _, plain = fit(tmp_path, LightningScoreCallback(every=10**6), 4)
    assert all(torch.equal(a, b) for a, b in zip(clipped.parameters(), plain.parameters(), strict=True))


def test_a_resumed_run_goes_on_with_its_threshold_and_count(tmp_path):
    trainer, _ = fit(tmp_path, LightningQKClipCallback(threshold=THRESHOLD), 4)
    trainer.save_checkpoint(tmp_path / "four.ckpt")
    again = LightningQKClipCallback()
    fit(tmp_path, again, 6, tmp_path / "four.ckpt")
    assert (again.clip.steps, again.clip.threshold) == (6, THRESHOLD)
