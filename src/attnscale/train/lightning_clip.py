"""LightningQKClipCallback: QK-Clip after every optimiser step of the Lightning Trainer."""

from typing import Any

from torch.utils.hooks import RemovableHandle

from attnscale.errors import SettingError
from attnscale.train.qk_clip import QKClip

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    raise SettingError("LightningQKClipCallback needs the package lightning; run 'pip install lightning'.") from None


class LightningQKClipCallback(Callback):
    """Hold scores under a threshold, after every step of the trainer's optimisers; arguments are QKClip's.

    The threshold is saved with each checkpoint, and restored with it.

        Trainer(..., callbacks=[attnscale.train.LightningQKClipCallback(threshold=100.0)])
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.clip: QKClip | None = None
        self._attached: list[RemovableHandle] = []
        self._saved: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, or go on where the checkpoint was taken."""
        self._leave()
        self.clip = QKClip(pl_module, **self.settings)
        if self._saved is not None:
            self.clip.load_state_dict({**self._saved, "steps": trainer.global_step})
            self._saved = None
        self._attached = [self.clip.attach(optimizer) for optimizer in trainer.optimizers]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop, and leave nothing in place."""
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing in place."""
        self._leave()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {} if self.clip is None else self.clip.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until training starts."""
        self._saved = state_dict or None

    def _leave(self) -> None:
        for handle in self._attached:
            handle.remove()
        self._attached = []
        if self.clip is not None:
            self.clip.close()
