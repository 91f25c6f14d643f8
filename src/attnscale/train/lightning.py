"""LightningScoreCallback: a Monitor in the Lightning Trainer."""

from typing import Any

from attnscale.errors import SettingError
from attnscale.train.monitor import Monitor

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    raise SettingError("LightningScoreCallback needs the package lightning; run 'pip install lightning'.") from None


class LightningScoreCallback(Callback):
    """Watch every `every`-th optimiser step, all its micro-batches; arguments are Monitor's.

    What it remembers is saved with each checkpoint, and restored with it.

        Trainer(..., callbacks=[attnscale.train.LightningScoreCallback(every=50, sinks=["scores.jsonl"])])
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.monitor: Monitor | None = None
        self._saved: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, or go on where the checkpoint was taken."""
        self.monitor = Monitor(pl_module, **self.settings)
        if self._saved is not None:
            self.monitor.load_state_dict({**self._saved, "steps": trainer.global_step})
            self._saved = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A micro-batch begins, the first of its step perhaps."""
        assert self.monitor is not None  # training started
        self.monitor.steps = trainer.global_step
        self.monitor.begin()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A micro-batch is over, and its step where the optimiser moved."""
        assert self.monitor is not None  # training started
        if trainer.global_step > self.monitor.steps:
            self.monitor.end()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop, and close what can be closed."""
        if self.monitor is not None:
            self.monitor.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing in place."""
        if self.monitor is not None:
            self.monitor.cancel()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {} if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until training starts."""
        self._saved = state_dict or None
