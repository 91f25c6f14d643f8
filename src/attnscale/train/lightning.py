"""LightningScoreCallback: a Monitor in the Lightning Trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnscale.errors import SettingError
from attnscale.train.delivery import LogChoice, is_fed_by_sink, logged_statistics
from attnscale.train.monitor import Monitor, rate_of
from attnscale.train.record import Record
from attnscale.train.sinks import scalars

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import Logger
except ImportError:
    raise SettingError("LightningScoreCallback needs the package lightning; run 'pip install lightning'.") from None


@dataclass(frozen=True)
class LightningLog:
    """Writes records to the loggers of a trainer, at the step of the loss of the same forwards."""

    loggers: Sequence[Logger]
    numbers: Sequence[str]

    def __call__(self, record: Record) -> None:
        """Add a point to every curve."""
        if not record.rank:
            for logger in self.loggers:
                logger.log_metrics(dict(scalars(record, self.numbers)), record.step)


class LightningScoreCallback(Callback):
    """Watch every `every`-th optimiser step, all its micro-batches; arguments are Monitor's, and `log`.

    The statistics of the live table go to the trainer's own loggers too, but to one whose tool `sinks` names as well.
    `log` may name other statistics, or be False.

    Records have the loss that training_step returned, and the learning rate of the first optimiser. The monitor's state
    is saved with each checkpoint, and loaded with it.

        Trainer(..., callbacks=[attnscale.train.LightningScoreCallback(every=50, sinks=["scores.jsonl"])])
    """

    def __init__(self, *, log: LogChoice = True, **settings: Any) -> None:
        self.settings, self._logged = settings, logged_statistics(log)
        self.monitor: Monitor | None = None
        self._saved: dict[str, Any] | None = None
        self._losses: list[Tensor] = []  # of the micro-batches of a sampled step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, or continue from a checkpoint."""
        self._losses = []
        self.monitor = Monitor(pl_module, **self.settings)
        loggers = [logger for logger in trainer.loggers if not is_fed_by_sink(logger, self.monitor.sinks)]
        if self._logged and loggers and trainer.is_global_zero:
            self.monitor.sinks.append(LightningLog(loggers, self._logged))
        if self._saved is not None:
            self.monitor.load_state_dict({**self._saved, "steps": trainer.global_step})
            self._saved = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a micro-batch."""
        assert self.monitor is not None  # training started
        self.monitor.steps = trainer.global_step
        self.monitor.note(lr=rate_of(trainer.optimizers[0]) if trainer.optimizers else None)
        self.monitor.begin()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a micro-batch, and its step where the optimiser moved."""
        assert self.monitor is not None  # training started
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self.monitor.is_due and isinstance(loss, Tensor):
            self._losses.append(loss.detach().float().mean())  # the trainer divided it by the number of micro-batches
        if trainer.global_step > self.monitor.steps:
            self.monitor.note(loss=torch.stack(self._losses).sum() if self._losses else None)
            self._losses = []
            self.monitor.end()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the monitor."""
        if self.monitor is not None:
            self.monitor.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop watching."""
        if self.monitor is not None:
            self.monitor.cancel()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {} if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts."""
        self._saved = state_dict or None
