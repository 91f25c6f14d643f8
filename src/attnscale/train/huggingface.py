"""ScoreCallback: a Monitor in the Hugging Face Trainer, and records in the trainer's own log."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from functools import wraps
from typing import Any

from torch import Tensor

from attnscale.errors import SettingError, SinkWarning
from attnscale.train.delivery import LogChoice, is_fed_by_sink, logged_statistics
from attnscale.train.monitor import Monitor, rate_of
from attnscale.train.record import Record
from attnscale.train.sinks import Sink, scalars

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler, ExportableState, PrinterCallback, ProgressCallback
except ImportError:
    raise SettingError("ScoreCallback needs the package transformers; run 'pip install attnscale[hf]'.") from None


class ScoreCallback(TrainerCallback, ExportableState):
    """Watch every `every`-th optimiser step, all its micro-batches; arguments are Monitor's, and `log`.

    The statistics of the live table go to the trainer's own log too: to state.log_history, and to every tool that its
    report_to names, but one that `sinks` names as well; Ray Train's report callback gets them like any other. `log` may
    name other statistics, or be False.

    Records have the loss of their step, not the mean since the log before, and the learning rate of that step.

    The monitor's state is saved in trainer_state.json of each checkpoint, and loaded when training resumes.

        Trainer(..., callbacks=[attnscale.train.ScoreCallback(every=50, sinks=["scores.jsonl"])])
    """

    def __init__(self, *, log: LogChoice = True, **settings: Any) -> None:
        self.settings, self._logged = settings, logged_statistics(log)
        self.monitor: Monitor | None = None
        self._loss = StepLoss(None)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"args": {}, "attributes": {} if self.monitor is None else {"remembered": self.monitor.state_dict()}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin, or continue from a checkpoint."""
        self._loss.end()  # of a step that was interrupted
        if self.monitor is not None:
            self.monitor.close()
        self.monitor = Monitor(kwargs["model"], **self.settings)
        trainer = calling_trainer(bool(self._logged))
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
        """Begin an optimiser step."""
        assert self.monitor is not None  # training began
        self.monitor.steps = state.global_step
        self.monitor.begin()
        if self.monitor.is_due:
            self.monitor.note(lr=rate_of(kwargs.get("optimizer")))
            self._loss.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End an optimiser step."""
        assert self.monitor is not None  # training began
        self.monitor.note(loss=self._loss.end())
        self.monitor.end()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the last record: the trainer has waited for its device, and its loggers are still open."""
        if self.monitor is not None:
            self.monitor.flush()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the monitor."""
        if self.monitor is not None:
            self.monitor.close()


class TrainerLog:
    """The log of one trainer, for `own`, a callback of it, without tools that one of `sinks` writes to already.

    Trainer.log() prints hundreds of numbers between the lines of a progress bar. So the trainer's callbacks are called
    instead, all but those that print.
    """

    def __init__(
        self, trainer: Any, own: TrainerCallback, numbers: Sequence[str] = (), sinks: Sequence[Sink] = ()
    ) -> None:
        self._trainer, self._own, self._numbers, self._sinks = trainer, own, numbers, sinks

    def __call__(self, record: Record) -> None:
        """Add a record at the step of the loss of the same forwards: the trainer counts from one."""
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
        failed: Exception | None = None
        for callback in self._trainer.callback_handler.callbacks:
            prints = isinstance(callback, (PrinterCallback, ProgressCallback))
            if callback is self._own or prints or is_fed_by_sink(callback, self._sinks):
                continue
            try:
                callback.on_log(args, at_step, control, logs=dict(numbers), model=model)
            except Exception as error:  # the others are still called
                failed = failed or error
        if failed is not None:
            raise failed


class StepLoss:
    """The loss of a sampled step: the sum of what training_step() returns for its micro-batches."""

    def __init__(self, trainer: Any | None) -> None:
        self._trainer = trainer
        self._losses: list[Tensor] = []
        self._is_wrapping = False

    def begin(self) -> None:
        """Wrap training_step() until end()."""
        if self._trainer is None or self._is_wrapping or "training_step" in vars(self._trainer):
            return
        step = getattr(self._trainer, "training_step", None)
        if step is None:
            return

        @wraps(step)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            self._losses.append(loss)
            return loss

        self._is_wrapping = True
        self._trainer.training_step = wrapped

    def end(self) -> Tensor | None:
        """Return the loss since begin(), and remove the wrapper."""
        losses, self._losses = self._losses, []
        if self._is_wrapping and self._trainer is not None:
            del self._trainer.training_step
            self._is_wrapping = False
        return sum(losses[1:], losses[0]) if losses else None


def calling_trainer(is_logged: bool = True) -> Any | None:
    """Return the trainer that called a callback; None, with a warning where its log is wanted, if none did."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(getattr(owner, "callback_handler", None), CallbackHandler):
            return owner
        frame = frame.f_back
    if is_logged:
        warnings.warn(
            "No Hugging Face Trainer called this callback, so there is no trainer's log to add to; log=False says "
            "that none is wanted.",
            SinkWarning,
            stacklevel=3,
        )
    return None
