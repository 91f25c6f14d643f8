"""Modules whose attention cannot be measured inside: each runs uncompiled and is followed, and the rest is not.

In a compiled model that ends a graph before such a module and begins another behind it, at sampled steps alone. Where
no graph may end, or would not be made at all then, the whole model is watched from outside instead.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn

from attnscale.inside.placing import APART, place, take_away
from attnscale.torch_internals import in_backward
from attnscale.watching.held import UNDER_A_MODE
from attnscale.watching.seen import Seen
from attnscale.watching.settings import Settings
from attnscale.watching.watcher import Watcher


class Apart:
    """Follows modules of a model from outside, one run of one of them at a time."""

    def __init__(self, model: nn.Module, settings: Settings, seen: Seen) -> None:
        self._model, self._settings, self._seen = model, replace(settings, known=None), seen
        self.failures: list[str] = []

    @cached_property
    def _watcher(self) -> Watcher:
        watcher = Watcher(self._model, self._settings, self._seen)
        watcher.failures = self.failures
        return watcher

    def run(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        """Follow one run of a module; one that a backward pass runs again was seen before."""
        if in_backward():
            return call()
        with ExitStack() as stack:
            for change in UNDER_A_MODE:
                stack.enter_context(change)
            return self._watcher.running.run(module, call)

    @contextmanager
    def followed(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Follow all of them for as long as this lasts."""
        with ExitStack() as stack:
            for module in modules.values():
                stack.callback(take_away, module, place(module, APART, self))
            yield
