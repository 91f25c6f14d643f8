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
    """Hold scores under a threshold, after every step of the optimiser; arguments are QKClip's, and `log`.

    How many heads were lowered since the log before goes to the trainer's own log, when it logs; `log=False` leaves it
    out.

    The threshold is saved in trainer_state.json of each checkpoint, and taken from there when training resumes.

        Trainer(..., callbacks=[attnscale.train.QKClipCallback(threshold=100.0)])
    """

    _log: TrainerLog | None = None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"args": {}, "attributes": {} if self.clip is None else {"remembered": self.clip.state_dict()}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin, or go on where the checkpoint was taken."""
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
        """Add the number of heads that were lowered to what the trainer logs."""
        if self._log is not None and "loss" in (kwargs.get("logs") or ()):
            self._log.add(self.take_log(), state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop, and leave nothing in place."""
        self.stop()
