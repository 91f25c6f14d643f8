"""QKClipCallback: QK-Clip after every optimiser step of the Hugging Face Trainer."""

from typing import Any

from attnscale.errors import SettingError
from attnscale.train.callbacks import DrivenQKClip

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState

    from attnscale.train.huggingface import TrainerLog, calling_trainer, remembered
except ImportError:
    raise SettingError("QKClipCallback needs the package transformers; run 'pip install attnscale[hf]'.") from None


class QKClipCallback(DrivenQKClip, TrainerCallback, ExportableState):
    """Keep scores below a threshold, after every step of the optimiser; takes QKClip's arguments, and `log`.

    The number of heads clipped since the last log goes to the trainer's own log, unless `log=False`.

    The threshold is saved in trainer_state.json of each checkpoint, and restored when training resumes.

        Trainer(..., callbacks=[attnscale.train.QKClipCallback(threshold=100.0)])
    """

    _log: TrainerLog | None = None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"args": {}, "attributes": {} if self.clip is None else {"remembered": self.clip.state_dict()}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin, or continue from a checkpoint."""
        optimizer = kwargs.get("optimizer")
        self.start(
            kwargs["model"], [] if optimizer is None else [optimizer], remembered(self, state), state.global_step
        )
        trainer = calling_trainer() if self._is_logged else None
        self._log = None if trainer is None else TrainerLog(trainer, self)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Clip after a step of the optimiser."""
        self.clip_step()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the number of clipped heads to the trainer's log."""
        if self._log is not None and "loss" in (kwargs.get("logs") or ()):
            self._log.add(self.take_log(), state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop, and remove everything from the model."""
        self.stop()
