"""The Hugging Face Trainer that a callback belongs to, which nobody tells it, and the loss of its steps."""

import inspect
import warnings
from functools import wraps
from typing import Any

from torch import Tensor
from transformers.trainer_callback import CallbackHandler

from attnscale.errors import SinkWarning


def trainer_above(is_logged: bool = True) -> Any | None:
    """The trainer that called a callback; None where something else did, which is told where its log is wanted."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(getattr(owner, "callback_handler", None), CallbackHandler):
            return owner
        frame = frame.f_back
    if is_logged:
        warnings.warn(
            "No Hugging Face Trainer called this callback, so there is no log of its own to add to; log=False says "
            "that none is wanted.",
            SinkWarning,
            stacklevel=3,
        )
    return None


class StepLoss:
    """The loss of a sampled step: what training_step() returns for its micro-batches, which the trainer sums up too."""

    def __init__(self, trainer: Any | None) -> None:
        self._trainer = trainer
        self._losses: list[Tensor] = []
        self._is_listening = False

    def begin(self) -> None:
        """Listen to training_step() until end()."""
        if self._trainer is None or self._is_listening or "training_step" in vars(self._trainer):
            return
        step = getattr(self._trainer, "training_step", None)
        if step is None:
            return

        @wraps(step)
        def listened(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            self._losses.append(loss)
            return loss

        self._is_listening = True
        self._trainer.training_step = listened

    def end(self) -> Tensor | None:
        """The loss that was heard; nothing is left in place."""
        losses, self._losses = self._losses, []
        if self._is_listening and self._trainer is not None:
            del self._trainer.training_step
            self._is_listening = False
        return sum(losses[1:], losses[0]) if losses else None
