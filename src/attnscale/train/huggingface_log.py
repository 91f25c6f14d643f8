"""TrainerLog: numbers in the log of a Hugging Face Trainer, and in every integration that its report_to names.

Trainer.log() prints what it is given: hundreds of numbers between the lines of a progress bar. So its callbacks are
handed the numbers, all but those that print.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from transformers import TrainerState
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback

from attnscale.train.own_loggers import has_them_already
from attnscale.train.record import Record
from attnscale.train.sinks import Sink
from attnscale.train.sinks.scalars import scalars


class TrainerLog:
    """The log of one trainer, for `own`, a callback of it; what one of `sinks` writes already is left out."""

    def __init__(
        self, trainer: Any, own: TrainerCallback, numbers: Sequence[str] = (), sinks: Sequence[Sink] = ()
    ) -> None:
        self._trainer, self._own, self._numbers, self._sinks = trainer, own, numbers, sinks

    def __call__(self, record: Record) -> None:
        """Add a record at the step that the loss of the same forwards has there: the trainer counts them from one."""
        if not record.rank:
            self.add(dict(scalars(record, self._numbers)), record.step + 1)

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        """Add numbers to state.log_history and hand them to every logger."""
        state: TrainerState = self._trainer.state
        if not numbers or not state.is_world_process_zero:
            return
        state.log_history.append({**numbers, "epoch": state.epoch, "step": step})
        then = copy(state)
        then.global_step = step
        args, control, model = self._trainer.args, self._trainer.control, self._trainer.model
        failed: Exception | None = None
        for callback in filter(self._is_fed, self._trainer.callback_handler.callbacks):
            try:
                callback.on_log(args, then, control, logs=dict(numbers), model=model)
            except Exception as error:  # the others get theirs
                failed = failed or error
        if failed is not None:
            raise failed

    def _is_fed(self, callback: TrainerCallback) -> bool:
        prints = isinstance(callback, (PrinterCallback, ProgressCallback))
        return callback is not self._own and not prints and not has_them_already(callback, self._sinks)
