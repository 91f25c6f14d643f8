"""Modules in which no probe can be placed: each runs uncompiled under the tracer, and the rest of the model does not.

In a compiled model that ends one graph before such a module and begins another behind it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

from torch import nn

from attnscale.probes.install import FALLBACK, install, remove
from attnscale.torch_internals import in_backward
from attnscale.watching.held import UNDER_A_MODE
from attnscale.watching.seen import Seen
from attnscale.watching.settings import Settings
from attnscale.watching.watcher import Watcher


class Fallback:
    """Traces modules of a model, one run of one of them at a time."""

    def __init__(self, model: nn.Module, settings: Settings, seen: Seen) -> None:
        self._model, self._settings, self._seen = model, settings, seen
        self.failures: list[str] = []

    @cached_property
    def _watcher(self) -> Watcher:
        watcher = Watcher(self._model, self._settings, self._seen)
        watcher.failures = self.failures
        return watcher

    def run(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        """Trace one run of a module; one that a backward pass runs again was seen before."""
        if in_backward():
            return call()
        with ExitStack() as stack:
            for change in UNDER_A_MODE:
                stack.enter_context(change)
            return self._watcher.running.run(module, call)

    @contextmanager
    def installed(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Trace all of these modules meanwhile."""
        with ExitStack() as stack:
            for module in modules.values():
                stack.callback(remove, module, install(module, FALLBACK, self))
            yield
