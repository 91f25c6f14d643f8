"""What is asked for, and what came of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

DEFAULT_LENGTH = 256  # tokens: enough for a distribution over keys, quick on a laptop


def silent(stage: str) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Request:
    """Which model, on what input, where."""

    model: str | None = None  # None: the one that ships with the package
    text: str | None = None  # None: Python's own help texts
    length: int | None = None  # tokens; None: DEFAULT_LENGTH, or as many as the model takes
    device: str = "cpu"
    random_init: bool = False
    report: Callable[[str], None] = field(default=silent, repr=False)  # called with what is being done


@dataclass(frozen=True)
class Loaded:
    """A model and the inputs to call it with: `model(*args, **kwargs)`."""

    model: nn.Module
    title: str  # how a person knows it
    fed: str  # what the inputs are, in words
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # one sentence each, on what was assumed

    def to(self, device: str) -> "Loaded":
        """The same with model and inputs on a device."""
        target = torch.device(device)
        args = tuple(_moved(value, target) for value in self.args)
        kwargs = {name: _moved(value, target) for name, value in self.kwargs.items()}
        return Loaded(self.model.to(target), self.title, self.fed, args, kwargs, self.notes)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(entry, device) for name, entry in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_moved(entry, device) for entry in value)
    return value
