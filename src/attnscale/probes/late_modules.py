"""Modules that did not run when their model was traced, and may attend: a tower that another kind of batch needs.

Each carries a count of its runs in the host's memory, so that reading it waits for no device.
"""

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from attnscale.probes.install import install, remove
from attnscale.probes.intercept import KINDS, ProbeKind
from attnscale.probes.ops import define_op, no_result
from attnscale.probes.placement import Placement

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
