"""LightningScoreCallback in real runs of the Lightning Trainer."""

import pytest
import torch
from torch.utils.data import DataLoader

from attnscale.train import LightningScoreCallback, read_log

from .training import batch, loss_of, small_model

lightning = pytest.importorskip("lightning.pytorch")

# lightning's own use of torch's trees
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")
LAYERS = ["model.blocks.0.attention", "model.blocks.1.attention"]


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = small_model()

    def training_step(self, tokens, index):
        return loss_of(self.model, tokens)

    def validation_step(self, tokens, index):
        loss_of(self.model, tokens)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-2)


def run(folder, callback, max_steps, checkpoint=None):
    loader = DataLoader(batch(16, 1), batch_size=2)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=max_steps, accumulate_grad_batches=2, callbacks=[callback], logger=False,
        default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, loader, loader, ckpt_path=checkpoint)
    return trainer, module


def test_a_run_is_recorded_every_so_many_optimiser_steps_with_all_their_micro_batches(tmp_path):
    run(tmp_path, LightningScoreCallback(every=3, rows=None, sinks=[tmp_path / "scores.jsonl"]), 7)
    records = read_log(tmp_path / "scores.jsonl").records
    assert [record.step for record in records] == [0, 3, 6]
    assert list(records[0].layers) == LAYERS
    assert [layer.rows for layer in records[0].layers.values()] == [3 * 2 * 2 * 13] * 2  # validation is not among them


def test_what_it_remembers_survives_resume(tmp_path):
    path = tmp_path / "scores.jsonl"
    trainer, _ = run(tmp_path, LightningScoreCallback(every=1, sinks=[path]), 4)
    trainer.save_checkpoint(tmp_path / "four.ckpt")
    again = LightningScoreCallback(every=1, sinks=[path])
    run(tmp_path, again, 7, tmp_path / "four.ckpt")
    assert again.monitor.growth(LAYERS[0]).step == again.monitor.last.step
    assert [record.step for record in read_log(path).records] == list(range(7))
