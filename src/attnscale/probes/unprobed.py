"""Modules without probes: fallbacks, which run under the tracer, and late modules, which did not run in the trace."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from attnscale.probes.install import FALLBACK, install, remove
from attnscale.probes.intercept import KINDS, ProbeKind
from attnscale.probes.ops import define_op, no_result
from attnscale.probes.placement import Placement
from attnscale.torch_internals import in_backward
from attnscale.watching.seen import Seen
from attnscale.watching.settings import Settings
from attnscale.watching.watch import UNDER_A_MODE
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
            return self._watcher.stack.run(module, call)

    @contextmanager
    def installed(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Trace all of these modules meanwhile."""
        with ExitStack() as stack:
            for module in modules.values():
                stack.callback(remove, module, install(module, FALLBACK, self))
            yield


KIND = "runs"


def _count_run(runs: Tensor) -> None:
    runs.add_(1)


count_run = define_op("count_run(Tensor(a!) runs) -> ()", _count_run, no_result, [torch.Tag.cudagraph_unsafe])


class _Runs(ProbeKind):
    def at_entry(self, carried: Any, is_traced: bool) -> None:
        if is_traced and type(carried) is not Tensor:
            count_run(carried)
        else:
            _count_run(carried.data)


KINDS[KIND] = _Runs()


class LateModules:
    """Counts runs of the modules that may attend and did not run in the trace, until it is closed."""

    def __init__(self, placement: Placement | None, known: Collection[str] = ()) -> None:
        """`known` are modules that need no counting any more."""
        modules = {} if placement is None else placement.late_modules
        self._runs = {path: torch.tensor([0]) for path in modules if path not in known}
        self._stack = ExitStack()
        for path, runs in self._runs.items():
            self._stack.callback(remove, modules[path], install(modules[path], KIND, runs))

    def ran(self) -> set[str]:
        """Return the paths of those that ran since this was last asked."""
        found = {path for path, runs in self._runs.items() if int(runs)}
        for path in found:
            self._runs[path].zero_()
        return found

    def close(self) -> None:
        """Stop counting."""
        self._stack.close()
