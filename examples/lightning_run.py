"""Train with LightningScoreCallback; show how much the largest score of each layer grew, and by which factor.

python examples/lightning_run.py
"""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

import attnscale
from attnscale.models import CausalTransformer
from attnscale.models.text import VOCABULARY, default_text, encode
from attnscale.train import Record

LENGTH, STEPS = 65, 60


class Language(LightningModule):
    """A LightningModule; the callback finds the attention in any module."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.model = CausalTransformer(VOCABULARY, d_model=64, layers=2, heads=2)

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        """Return the cross-entropy of the next byte."""
        loss = F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam with a constant rate."""
        return torch.optim.Adam(self.parameters(), self.learning_rate)


def main() -> None:
    """Train at ten times a suitable rate, and print the growth of the scores."""
    torch.manual_seed(0)
    rows = encode(default_text())[: 8 * STEPS * LENGTH].view(-1, LENGTH)
    records: list[Record] = []
    trainer = Trainer(
        accelerator="cpu", max_steps=STEPS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[attnscale.train.LightningScoreCallback(every=5, sinks=[records.append])],  # or "scores.jsonl"
    )  # fmt: skip
    trainer.fit(Language(learning_rate=3e-2), DataLoader(rows, batch_size=8))

    first, last = records[0], records[-1]
    print(f"loss {float(trainer.callback_metrics['loss']):.2f} after {STEPS} steps, {len(records)} of them recorded")
    for layer in first.layers:
        before, after = (
            {name: record.layers[layer].whole(name) for name in ("max", "scale_applied", "query_norm", "key_norm")}
            for record in (first, last)
        )
        times = {name: after[name] / before[name] for name in before}
        print(
            f"{layer}: largest score {before['max']:.3g} to {after['max']:.3g}; "
            f"multiplier × {times['scale_applied']:.2f}, ‖q‖ × {times['query_norm']:.2f}, ‖k‖ × {times['key_norm']:.2f}"
        )
    alarms = [alarm for record in records for alarm in record.alarms]
    print(f"alarms: {len(alarms)}")


if __name__ == "__main__":
    main()
