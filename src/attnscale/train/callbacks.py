"""A Monitor and a QKClip that a trainer drives: the common part of the Hugging Face and Lightning callbacks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnscale.acting.parameters import refuse_copies
from attnscale.errors import SettingError
from attnscale.measure.statistics import Place, in_place, logged
from attnscale.train.monitor import Monitor
from attnscale.train.qk_clip import QKClip
from attnscale.train.sinks import MLflow, Sink, TensorBoard, WeightsAndBiases

# Prefixes, in lower case, of the names of trainers' loggers that write to the tool of a sink.
TOOLS = {TensorBoard: "tensorboard", WeightsAndBiases: "wandb", MLflow: "mlflow"}
LogChoice = bool | Sequence[str]
CLIPPED_HEADS = "attnscale/clipped_heads"  # number of heads clipped since the last log


class DrivenMonitor:
    """Takes Monitor's arguments, creates a monitor when training begins, and ends its step after the optimiser's."""

    def __init__(self, log: LogChoice, settings: dict[str, Any]) -> None:
        self.settings, self.logged = settings, logged_statistics(log)
        self.monitor: Monitor | None = None
        self._losses: list[Tensor] = []  # of the micro-batches of a sampled step

    def start(self, model: nn.Module, log: Sink | None, state: Mapping[str, Any] | None, step: int) -> None:
        """Begin, or continue at `step` from the state of a checkpoint; `log` is the trainer's own."""
        self.stop()
        self._losses = []
        self.monitor = Monitor(model, **self.settings)
        self.monitor.sinks += [log] if log is not None and self.logged else []
        if state:
            self.monitor.load_state_dict({**state, "steps": step})

    def has_sink_of(self, logger: object) -> bool:
        """Return True if a sink writes the same curves to the tool of a trainer's logger."""
        sinks = () if self.monitor is None else self.monitor.sinks
        tools = tuple(tool for kind, tool in TOOLS.items() if any(isinstance(sink, kind) for sink in sinks))
        return any(kind.__name__.lower().startswith(tools) for kind in type(logger).__mro__)

    def begin_step(self, step: int, optimizer: Any) -> None:
        """Begin an optimiser step, or another micro-batch of it."""
        assert self.monitor is not None  # training began
        self.monitor.steps = step
        groups = getattr(optimizer, "param_groups", None)
        self.monitor.note(lr=groups[0].get("lr") if groups else None)
        self.monitor.begin()

    def add_loss(self, loss: Any) -> None:
        """Add the loss of a micro-batch; the loss of a step is their sum."""
        if self.monitor is not None and self.monitor.is_due and isinstance(loss, Tensor):
            self._losses.append(loss.detach().float().mean())

    def end_step(self) -> None:
        """End an optimiser step."""
        assert self.monitor is not None  # training began
        losses, self._losses = self._losses, []
        self.monitor.note(loss=torch.stack(losses).sum() if losses else None)
        self.monitor.end()

    def stop(self) -> None:
        """Close the monitor."""
        if self.monitor is not None:
            self.monitor.close()


class DrivenQKClip:
    """Takes QKClip's arguments, creates the QKClip when training begins, and counts the clipped heads."""

    def __init__(self, *, log: bool = True, **settings: Any) -> None:
        self.settings, self._is_logged = settings, log
        self._lowered: set[tuple[str, int]] = set()  # layers and heads, since the last log
        self.clip: QKClip | None = None

    def start(self, model: nn.Module, optimizers: Sequence[Any], state: Mapping[str, Any] | None, step: int) -> None:
        """Begin, or continue at `step` from the state of a checkpoint."""
        self.stop()
        for optimizer in optimizers:
            refuse_copies(model, optimizer)
        self.clip = QKClip(model, **self.settings)
        if state:
            self.clip.load_state_dict({**state, "steps": step})

    def clip_step(self, *_: Any) -> None:
        """Clip after a step of the optimiser."""
        assert self.clip is not None  # training began
        report = self.clip.step()
        self._lowered |= set() if report is None else {(head.layer, head.head) for head in report.heads}

    def take_log(self) -> dict[str, float]:
        """Return the numbers to log, and restart the count."""
        lowered, self._lowered = self._lowered, set()
        return {CLIPPED_HEADS: len(lowered)}

    def stop(self) -> None:
        """Stop, and remove everything from the model."""
        if self.clip is not None:
            self.clip.close()


def logged_statistics(choice: LogChoice) -> tuple[str, ...]:
    """Return the statistics for a trainer's loggers: those of the live table, the chosen ones, or none.

    >>> logged_statistics(["spread", "max"]), logged_statistics(False)
    (('spread', 'max'), ())
    """
    if isinstance(choice, bool):
        return tuple(entry.name for entry in in_place(Place.LIVE)) if choice else ()
    known = logged()
    if isinstance(choice, str) or not all(name in known for name in choice):
        raise SettingError(f"Expected log as True, False or a list of {', '.join(known)}; got {choice!r}.")
    return tuple(choice)
