"""Callbacks of the Lightning Trainer: a Monitor, and QK-Clip."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch.utils.hooks import RemovableHandle

from attnscale.errors import SettingError
from attnscale.train.callbacks import DrivenMonitor, DrivenQKClip, LogChoice
from attnscale.train.record import Record
from attnscale.train.sinks import scalars

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import Logger
except ImportError:
    raise SettingError("This callback needs the package lightning; run 'pip install lightning'.") from None


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


class LightningQKClipCallback(DrivenQKClip, Callback):
    """Keep scores below a threshold, after every step of the trainer's optimisers; takes QKClip's arguments, and `log`.

    The number of heads clipped since the last log goes to the trainer's loggers together with the loss, unless
    `log=False`.

    The threshold is saved with each checkpoint, and restored with it.

        Trainer(..., callbacks=[attnscale.train.LightningQKClipCallback(threshold=100.0)])
    """

    def __init__(self, *, log: bool = True, **settings: Any) -> None:
        super().__init__(log=log, **settings)
        self._logged_at = 0  # steps, at the last log
        self._attached: list[RemovableHandle] = []
        self._saved: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, or continue from a checkpoint."""
        self.stop()
        self._logged_at = trainer.global_step
        self.start(pl_module, trainer.optimizers, self._saved, trainer.global_step)
        self._saved = None
        self._attached = [optimizer.register_step_post_hook(self.clip_step) for optimizer in trainer.optimizers]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the number of clipped heads when the trainer logs the loss."""
        steps, every = trainer.global_step, int(getattr(trainer, "log_every_n_steps", 0))
        if self._is_logged and trainer.is_global_zero and every and steps // every > self._logged_at // every:
            self._logged_at = steps
            metrics = self.take_log()
            for logger in trainer.loggers:
                logger.log_metrics(metrics, steps - 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop, and remove everything from the model."""
        self.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove everything from the model."""
        self.stop()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {} if self.clip is None else self.clip.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts."""
        self._saved = state_dict or None

    def stop(self) -> None:
        """Stop, and remove everything from the model."""
        for handle in self._attached:
            handle.remove()
        self._attached = []
        super().stop()
