"""QKClipCallback: QK-Clip after every optimiser step of the Hugging Face Trainer."""

from typing import Any

from attnscale.acting.parameters import refuse_copies
from attnscale.errors import SettingError
from attnscale.train.callbacks import CLIPPED_HEADS
from attnscale.train.qk_clip import QKClip

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState

    from attnscale.train.huggingface import TrainerLog, calling_trainer, remembered
except ImportError:
    raise SettingError("QKClipCallback needs the package transformers; run 'pip install attnscale[hf]'.") from None


class QKClipCallback(TrainerCallback, ExportableState):
    """Hold scores under a threshold, after every step of the optimiser; arguments are QKClip's, and `log`.

    How many heads were lowered since the log before goes to the trainer's own log, when it logs; `log=False` leaves it
    out.

    The threshold is saved in trainer_state.json of each checkpoint, and taken from there when training resumes.

        Trainer(..., callbacks=[attnscale.train.QKClipCallback(threshold=100.0)])
    """

    def __init__(self, *, log: bool = True, **settings: Any) -> None:
        self.settings, self._is_logged = settings, log
        self._log: TrainerLog | None = None
        self._clipped: set[tuple[str, int]] = set()  # layers and heads, since the log before
        self.clip: QKClip | None = None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"args": {}, "attributes": {} if self.clip is None else {"remembered": self.clip.state_dict()}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin, or go on where the checkpoint was taken."""
        if self.clip is not None:
            self.clip.close()
        self.clip = QKClip(kwargs["model"], **self.settings)
        refuse_copies(kwargs["model"], kwargs.get("optimizer"))
        trainer = calling_trainer() if self._is_logged else None
        self._log = None if trainer is None else TrainerLog(trainer, self)
        saved = remembered(self, state)
        if saved is not None:
            self.clip.load_state_dict({**saved, "steps": state.global_step})

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Clip after a step of the optimiser."""
        assert self.clip is not None  # training began
        report = self.clip.step()
        self._clipped |= set() if report is None else {(head.layer, head.head) for head in report.heads}

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the number of heads that were lowered to what the trainer logs."""
        if self._log is not None and "loss" in (kwargs.get("logs") or ()):
            self._log.add({CLIPPED_HEADS: len(self._clipped)}, state.global_step)
            self._clipped = set()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop, and leave nothing in place."""
        if self.clip is not None:
            self.clip.close()
