"""LightningScoreCallback: a Monitor in the Lightning Trainer."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from attnscale.errors import SettingError
from attnscale.train.callbacks import DrivenMonitor, LogChoice
from attnscale.train.record import Record
from attnscale.train.sinks import scalars

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import Logger
except ImportError:
    raise SettingError("LightningScoreCallback needs the package lightning; run 'pip install lightning'.") from None


class LightningScoreCallback(DrivenMonitor, Callback):
    """Measure every `every`-th optimiser step with all its micro-batches; takes Monitor's arguments, and `log`.

    The statistics of the live table also go to the trainer's loggers. `log` may list other statistics, or be False.

    Records have the loss that training_step returned, and the learning rate of the first optimiser. The monitor's state
    is saved with each checkpoint, and loaded with it.

        Trainer(..., callbacks=[attnscale.train.LightningScoreCallback(every=50, sinks=["scores.jsonl"])])
    """

    def __init__(self, *, log: LogChoice = True, **settings: Any) -> None:
        super().__init__(log, settings)
        self._saved: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, or continue from a checkpoint."""
        has_log = trainer.is_global_zero and trainer.loggers
        self.start(
            pl_module, partial(self._log, trainer.loggers) if has_log else None, self._saved, trainer.global_step
        )
        self._saved = None

    def _log(self, loggers: Sequence[Logger], record: Record) -> None:
        for logger in () if record.rank else loggers:
            if not self.has_sink_of(logger):
                logger.log_metrics(dict(scalars(record, self.logged)), record.step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a micro-batch."""
        self.begin_step(trainer.global_step, trainer.optimizers[0] if trainer.optimizers else None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a micro-batch, and its step if the optimiser stepped."""
        self.add_loss(outputs.get("loss") if isinstance(outputs, Mapping) else outputs)  # divided by the trainer
        if self.monitor is not None and trainer.global_step > self.monitor.steps:
            self.end_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the monitor."""
        self.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop measuring."""
        if self.monitor is not None:
            self.monitor.cancel()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {} if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts."""
        self._saved = state_dict or None
