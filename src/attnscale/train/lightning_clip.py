"""LightningQKClipCallback: QK-Clip after every optimiser step of the Lightning Trainer."""

from typing import Any

from torch.utils.hooks import RemovableHandle

from attnscale.acting.parameters import refuse_copies
from attnscale.errors import SettingError
from attnscale.train.callbacks import CLIPPED_HEADS
from attnscale.train.qk_clip import QKClip

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    raise SettingError("LightningQKClipCallback needs the package lightning; run 'pip install lightning'.") from None


class LightningQKClipCallback(Callback):
    """Hold scores under a threshold, after every step of the trainer's optimisers; arguments are QKClip's, and `log`.

    How many heads were lowered since the log before goes to the trainer's own loggers, as often as they are given the
    loss; `log=False` leaves it out.

    The threshold is saved with each checkpoint, and restored with it.

        Trainer(..., callbacks=[attnscale.train.LightningQKClipCallback(threshold=100.0)])
    """

    def __init__(self, *, log: bool = True, **settings: Any) -> None:
        self.settings, self._is_logged = settings, log
        self._clipped: set[tuple[str, int]] = set()  # layers and heads, since the log before
        self._told = 0  # steps, at the log before
        self.clip: QKClip | None = None
        self._attached: list[RemovableHandle] = []
        self._saved: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, or go on where the checkpoint was taken."""
        self._leave()
        self._told = trainer.global_step
        for optimizer in trainer.optimizers:
            refuse_copies(pl_module, optimizer)
        self.clip = QKClip(pl_module, **self.settings)
        if self._saved is not None:
            self.clip.load_state_dict({**self._saved, "steps": trainer.global_step})
            self._saved = None
        self._attached = [optimizer.register_step_post_hook(self._step) for optimizer in trainer.optimizers]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tell the loggers what was lowered, when the trainer tells them the loss."""
        assert self.clip is not None  # training started
        steps, every = trainer.global_step, int(getattr(trainer, "log_every_n_steps", 0))
        if self._is_logged and trainer.is_global_zero and every and steps // every > self._told // every:
            self._told = steps
            for logger in trainer.loggers:
                logger.log_metrics({CLIPPED_HEADS: len(self._clipped)}, steps - 1)
            self._clipped = set()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop, and leave nothing in place."""
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing in place."""
        self._leave()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {} if self.clip is None else self.clip.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts."""
        self._saved = state_dict or None

    def _step(self, *_: Any) -> None:
        assert self.clip is not None  # training started
        report = self.clip.step()
        self._clipped |= set() if report is None else {(head.layer, head.head) for head in report.heads}

    def _leave(self) -> None:
        for handle in self._attached:
            handle.remove()
        self._attached = []
        if self.clip is not None:
            self.clip.close()
