"""LightningQKClipCallback: QK-Clip after every optimiser step of the Lightning Trainer."""

from typing import Any

from torch.utils.hooks import RemovableHandle

from attnscale.errors import SettingError
from attnscale.train.callbacks import DrivenQKClip

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    raise SettingError("LightningQKClipCallback needs the package lightning; run 'pip install lightning'.") from None


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
