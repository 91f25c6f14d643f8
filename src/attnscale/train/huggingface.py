"""Callbacks of the Hugging Face Trainer: a Monitor with its records in the trainer's own log, and QK-Clip."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from functools import wraps
from typing import Any

from attnscale.errors import SettingError, SinkWarning
from attnscale.train.callbacks import DrivenMonitor, DrivenQKClip, LogChoice
from attnscale.train.record import Record
from attnscale.train.sinks import scalars

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler, ExportableState, PrinterCallback, ProgressCallback
except ImportError:
    raise SettingError("This callback needs the package transformers; run 'pip install attnscale[hf]'.") from None


class ScoreCallback(DrivenMonitor, TrainerCallback, ExportableState):
    """Measure every `every`-th optimiser step with all its micro-batches; takes Monitor's arguments, and `log`.

    The statistics of the live table also go to the trainer's own log: to state.log_history, and to every tool in its
    report_to; Ray Train's report callback gets them too. `log` may list other statistics, or be False.

    Records have the loss of their step, not the mean since the last log, and the learning rate of that step.

    The monitor's state is saved in trainer_state.json of each checkpoint, and loaded when training resumes.

        Trainer(..., callbacks=[attnscale.train.ScoreCallback(every=50, sinks=["scores.jsonl"])])
    """

    def __init__(self, *, log: LogChoice = True, **settings: Any) -> None:
        super().__init__(log, settings)
        self._wrapped: Any = None  # the trainer whose training_step() is wrapped to read its losses

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"args": {}, "attributes": {} if self.monitor is None else {"remembered": self.monitor.state_dict()}}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Begin, or continue from a checkpoint."""
        trainer = calling_trainer(bool(self.logged))
        log = None if trainer is None else TrainerLog(trainer, self, self.logged)
        self.start(kwargs["model"], log, remembered(self, state), state.global_step)
        step = getattr(trainer, "training_step", None)
        if step is not None and "training_step" not in vars(trainer):

            @wraps(step)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                loss = step(*args, **kwargs)
                self.add_loss(loss)
                return loss

            self._wrapped = trainer
            self._wrapped.training_step = wrapped

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Begin an optimiser step."""
        self.begin_step(state.global_step, kwargs.get("optimizer"))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End an optimiser step."""
        self.end_step()

    def on_log(self, *_: Any, **__: Any) -> None:
        """Write the last record, while the trainer's loggers are still open."""
        if self.monitor is not None:
            self.monitor.flush()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Close the monitor."""
        self.stop()
        if self._wrapped is not None:
            del self._wrapped.training_step
            self._wrapped = None


class TrainerLog:
    """The log of one trainer, for its callback `own`.

    Trainer.log() would print hundreds of numbers between the lines of a progress bar. So the trainer's callbacks are
    called instead, except those that print.
    """

    def __init__(self, trainer: Any, own: TrainerCallback, numbers: Sequence[str] = ()) -> None:
        self._trainer, self._own, self._numbers = trainer, own, numbers

    def __call__(self, record: Record) -> None:
        """Add a record at the step of its loss; the trainer counts steps from one."""
        if not record.rank:
            self.add(dict(scalars(record, self._numbers)), record.step + 1)

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        """Add numbers to state.log_history and call every logger with them."""
        state: TrainerState = self._trainer.state
        if not numbers or not state.is_world_process_zero:
            return
        state.log_history.append({**numbers, "epoch": state.epoch, "step": step})
        at_step = copy(state)
        at_step.global_step = step
        args, control, model = self._trainer.args, self._trainer.control, self._trainer.model
        failures = []
        for callback in self._trainer.callback_handler.callbacks:
            is_fed = isinstance(self._own, DrivenMonitor) and self._own.has_sink_of(callback)
            if is_fed or callback is self._own or isinstance(callback, (PrinterCallback, ProgressCallback)):
                continue
            try:
                callback.on_log(args, at_step, control, logs=dict(numbers), model=model)
            except Exception as error:  # the other loggers are still called
                failures.append(error)
        if failures:
            raise failures[0]


def remembered(callback: TrainerCallback, state: TrainerState) -> dict[str, Any] | None:
    """Return the state of a callback in the checkpoint that training resumes from."""
    stored: Any = state.stateful_callbacks
    saved = stored.get(type(callback).__name__) if isinstance(stored, dict) else None
    return saved["attributes"].get("remembered") if isinstance(saved, dict) and state.global_step else None


def calling_trainer(is_logged: bool = True) -> Any | None:
    """Return the trainer that called a callback, or None; warns if its log is needed."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(getattr(owner, "callback_handler", None), CallbackHandler):
            return owner
        frame = frame.f_back
    if is_logged:
        warnings.warn(
            "No Hugging Face Trainer called this callback, so its numbers are not added to a trainer's log. Pass "
            "log=False to silence this warning.",
            SinkWarning,
            stacklevel=3,
        )
    return None


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
