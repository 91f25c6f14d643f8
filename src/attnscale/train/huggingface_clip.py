"""QKClipCallback: QK-Clip after every optimiser step of the Hugging Face Trainer."""

from typing import Any

from attnscale.errors import SettingError
from attnscale.train.qk_clip import QKClip

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ImportError:
    raise SettingError("QKClipCallback needs the package transformers; run 'pip install attnscale[hf]'.") from None


class QKClipCallback(TrainerCallback, ExportableState):
    """Hold scores under a threshold, after every step of the optimiser; arguments are QKClip's.

    The threshold is saved in trainer_state.json of each checkpoint, and taken from there when training resumes.

        Trainer(..., callbacks=[attnscale.train.QKClipCallback(threshold=100.0)])
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.clip: QKClip | None = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"args": {}, "attributes": {} if self.clip is None else {"remembered": self.clip.state_dict()}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin, or go on where the checkpoint was taken."""
        if self.clip is not None:
            self.clip.close()
        self.clip = QKClip(kwargs["model"], **self.settings)
        stored: Any = state.stateful_callbacks
        saved = stored.get(type(self).__name__) if isinstance(stored, dict) else None
        remembered = saved["attributes"].get("remembered") if isinstance(saved, dict) else None
        if remembered is not None and state.global_step:
            self.clip.load_state_dict({**remembered, "steps": state.global_step})

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The optimiser has moved."""
        assert self.clip is not None  # training began
        self.clip.step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop, and leave nothing in place."""
        if self.clip is not None:
            self.clip.close()
