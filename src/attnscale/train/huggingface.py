"""ScoreCallback: a Monitor in the Hugging Face Trainer."""

from typing import Any

from attnscale.errors import SettingError
from attnscale.train.learning import rate_of
from attnscale.train.monitor import Monitor
from attnscale.train.own_loggers import Wanted, numbers_of

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState

    from attnscale.train.huggingface_log import TrainerLog
    from attnscale.train.huggingface_trainer import StepLoss, trainer_above
except ImportError:
    raise SettingError("ScoreCallback needs the package transformers; run 'pip install attnscale[hf]'.") from None


class ScoreCallback(TrainerCallback, ExportableState):
    """Watch every `every`-th optimiser step, all its micro-batches; arguments are Monitor's, and `log`.

    What the live table shows goes to the trainer's own log too: to state.log_history, and to every tool that its
    report_to names, but one that `sinks` names as well. `log` may name other statistics, or be False.

    Records have the loss of their step, not the mean since the log before, and the learning rate it was made with.

    What it remembers is saved in trainer_state.json of each checkpoint, and taken from there when training resumes.

        Trainer(..., callbacks=[attnscale.train.ScoreCallback(every=50, sinks=["scores.jsonl"])])
    """

    def __init__(self, *, log: Wanted = True, **settings: Any) -> None:
        self.settings, self._logged = settings, numbers_of(log)
        self.monitor: Monitor | None = None
        self._loss = StepLoss(None)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"args": {}, "attributes": {} if self.monitor is None else {"remembered": self.monitor.state_dict()}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin, or go on where the checkpoint was taken."""
        self._loss.end()  # of a step that was broken off
        if self.monitor is not None:
            self.monitor.close()
        self.monitor = Monitor(kwargs["model"], **self.settings)
        trainer = trainer_above(bool(self._logged))
        self._loss = StepLoss(trainer)
        if trainer is not None and self._logged:
            self.monitor.sinks.append(TrainerLog(trainer, self, self._logged, tuple(self.monitor.sinks)))
        stored: Any = state.stateful_callbacks
        saved = stored.get(type(self).__name__) if isinstance(stored, dict) else None
        remembered = saved["attributes"].get("remembered") if isinstance(saved, dict) else None
        if remembered is not None and state.global_step:
            self.monitor.load_state_dict({**remembered, "steps": state.global_step})

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """An optimiser step begins."""
        assert self.monitor is not None  # training began
        self.monitor.steps = state.global_step
        self.monitor.begin()
        if self.monitor.is_due:
            self.monitor.note(lr=rate_of(kwargs.get("optimizer")))
            self._loss.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """It is over."""
        assert self.monitor is not None  # training began
        self.monitor.note(loss=self._loss.end())
        self.monitor.end()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The trainer has waited for its device; and the last time it logs, its loggers are still open."""
        if self.monitor is not None:
            self.monitor.flush()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop, and close what can be closed."""
        if self.monitor is not None:
            self.monitor.close()
