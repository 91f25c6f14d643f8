"""What is asked for, and what came of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnscale.loading.given import Sequence, cut
from attnscale.models.text import default_text

DEFAULT_LENGTH = 256  # tokens: enough for a distribution over keys, quick on a laptop


def silent(stage: str) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Request:
    """Which model, on what input, where."""

    model: str | None = None  # None: the one that ships with the package
    text: str | None = None  # None, and no sequences either: Python's own help texts
    length: int | None = None  # tokens; None: DEFAULT_LENGTH, or as many as the model takes
    device: str = "cpu"
    random_init: bool = False
    sequences: tuple[Sequence, ...] = ()  # texts or token ids, run as one batch
    report: Callable[[str], None] = field(default=silent, repr=False)  # called with what is being done
    model_type: str | None = None  # of a configuration that names none
    factory: str | None = None  # package.module:callable, which makes the model that a file of weights is for
    base: str | None = None  # the model that an adapter is put on, where it is not the one that it names
    download: bool = False  # fetch a model by name before it is read
    samples: int = 1  # sequences to cut a text into, or to draw, where none are given

    @property
    def given(self) -> tuple[Sequence, ...]:
        """What the user gave to run the model on; empty where nothing was."""
        return cut(self.text, self.samples) if self.text is not None else self.sequences

    @property
    def texts(self) -> tuple[Sequence, ...]:
        """The same, or English text where nothing was given."""
        return self.given or cut(default_text(), self.samples)

    @property
    def source(self) -> str:
        """Where the tokens come from, in words."""
        if self.text is not None:
            return "the text"
        number = len(self.sequences)
        return {0: "English text", 1: "the sequence given"}.get(number, f"the {number} sequences given")


@dataclass(frozen=True)
class Loaded:
    """A model and the inputs to call it with: `model(*args, **kwargs)`."""

    model: nn.Module
    title: str  # how a person knows it
    fed: str  # what the inputs are, in words
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # one sentence each, on what was assumed
    unknown: float = 0.0  # share of the tokens that the model has no word for

    def to(self, device: str) -> "Loaded":
        """The same with model and inputs on a device."""
        target = torch.device(device)
        args = tuple(_moved(value, target) for value in self.args)
        kwargs = {name: _moved(value, target) for name, value in self.kwargs.items()}
        return replace(self, model=self.model.to(target), args=args, kwargs=kwargs)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(entry, device) for name, entry in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_moved(entry, device) for entry in value)
    return value
