"""Placement of probes: the modules of a model that get probes by a plan, and the modules that do not.

Fallback modules run under the tracer. Late modules did not run in the trace.
"""

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from attnscale.module_paths import modules_by_path
from attnscale.probes.calls import NumbersBuffer
from attnscale.probes.install import (
    FALLBACK,
    can_install,
    close_frames,
    define_op,
    install,
    no_result,
    plain_class,
    remove,
)
from attnscale.probes.intercept import KINDS, ProbeKind, ProbeTensors, layouts_of
from attnscale.probes.stats import Slot
from attnscale.torch_internals import in_backward, submodules_of
from attnscale.watching.plan import Plan
from attnscale.watching.sdpa_names import Redirected, names_of_sdpa
from attnscale.watching.seen import Seen
from attnscale.watching.watch import UNDER_A_MODE
from attnscale.watching.watcher import Settings, Watcher


class Placement:
    """The probed modules of a model, by their path, and the fallback modules, which run under the tracer."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.model, self.plan, self.all_modules = model, plan, modules_by_path(model)
        self.root_name = type(self.all_modules[""]).__name__
        self._is_found = all(path in self.all_modules for path in plan.attending)
        found = {path: self.all_modules[path] for path in sorted(plan.attending) if path in self.all_modules}
        self.modules = {path: found[path] for path in plan.modules if path in found and can_install(found[path])}
        self.fallbacks = {path: module for path, module in found.items() if path not in self.modules}
        files = {call.line[0] for each in plan.modules.values() for call in each.calls if call.line is not None}
        runs_eager = not all(each.is_compiled for each in plan.modules.values())
        self._names = names_of_sdpa(files) if runs_eager else []
        self.buffers: dict[torch.device, NumbersBuffer] = {}  # a monitor reuses them at every sampled step
        self.slots: dict[str, tuple[Any, Slot]] = {}  # also reused: a ModuleProbe and the tensors of its module
        self._layouts = {path: layouts_of(plan.modules[path]) for path in self.modules}

    def obstacle(self) -> str:
        """Return why the model cannot be measured by this plan; empty if it can."""
        if not self._is_found or not self.modules:
            return "its attention modules are not where they were when it was traced"
        alone = (path for path in self.fallbacks if not self._can_run_alone(path))
        return next((f"{path or 'the model itself'}: {self.reason(path)}" for path in alone), "")

    def reason(self, path: str) -> str:
        """Return why a module falls back to the tracer."""
        return self.plan.fallbacks.get(path, "its forward was replaced")

    def _can_run_alone(self, path: str) -> bool:
        """Return True if this module alone can run uncompiled: no attending module contains it or is inside it."""
        others = (other for other in (*self.modules, *self.fallbacks) if other != path)
        is_nested = any(f"{other}.".startswith(f"{path}.") or f"{path}.".startswith(f"{other}.") for other in others)
        return path not in self.plan.pinned and can_install(self.fallbacks[path]) and not is_nested

    @cached_property
    def paths(self) -> dict[int, str]:
        """Path of each module, by its id."""
        return {id(module): path for path, module in self.all_modules.items()}

    @cached_property
    def late_modules(self) -> dict[str, nn.Module]:
        """Modules that did not run in the trace, except those of a class that ran without attending."""
        modules, called = self.all_modules, self.plan.called
        above = {parent for path in called for parent in _parents(path)}
        holders = {parent for path in self.plan.attending for parent in (path, *_parents(path))}
        ran, attended = ({plain_class(modules[path]) for path in some if path in modules} for some in (called, holders))
        return {
            path: module
            for path, module in modules.items()
            if path not in called and path not in above and plain_class(module) not in ran - attended
            if _may_attend(module)
        }

    @contextmanager
    def probed(self, kind: str, tensors: Callable[[str], ProbeTensors]) -> Iterator[None]:
        """Install a probe of this kind in every module; `tensors` maps a module's path to its probe's tensors."""
        with ExitStack() as stack:
            stack.callback(close_frames)
            stack.enter_context(Redirected(self._names))
            for path, module in self.modules.items():
                stack.callback(remove, module, install(module, kind, tensors(path), self._layouts[path]))
            yield


def _parents(path: str) -> Iterator[str]:
    parts = path.split(".")
    return (".".join(parts[:end]) for end in range(len(parts)))


def _may_attend(module: nn.Module) -> bool:
    """Return False for torch's own layers without submodules."""
    is_torch_own = plain_class(module).__module__.startswith("torch.nn.")
    return can_install(module) and (not is_torch_own or any(module.children()))


class Fallback:
    """Traces single runs of fallback modules."""

    def __init__(self, model: nn.Module, settings: Settings, seen: Seen) -> None:
        self._model, self._settings, self._seen = model, settings, seen
        self.failures: list[str] = []

    @cached_property
    def _watcher(self) -> Watcher:
        watcher = Watcher(self._model, self._settings, self._seen)
        watcher.failures = self.failures
        return watcher

    def run(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        """Trace one run of a module, unless a backward pass recomputes it."""
        if in_backward():
            return call()
        with ExitStack() as stack:
            for change in UNDER_A_MODE:
                stack.enter_context(change)
            return self._watcher.stack.run(module, call)

    @contextmanager
    def installed(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Trace these modules inside the context."""
        with ExitStack() as stack:
            for module in modules.values():
                stack.callback(remove, module, install(module, FALLBACK, self))
            yield


KIND = "runs"


def _count_run(runs: Tensor) -> None:
    runs.add_(1)


count_run = define_op("count_run(Tensor(a!) runs) -> ()", _count_run, no_result, [torch.Tag.cudagraph_unsafe])


class _Runs(ProbeKind):
    def at_entry(self, tensors: Any) -> None:
        if type(tensors) is Tensor:
            _count_run(tensors.data)
        else:
            count_run(tensors)


KINDS[KIND] = _Runs()


class LateModules:
    """Counts runs of late modules until it is closed."""

    def __init__(self, placement: Placement | None) -> None:
        modules = {} if placement is None else placement.late_modules
        self._runs = {path: torch.tensor([0]) for path in modules}
        self._stack = ExitStack()
        for path, runs in self._runs.items():
            self._stack.callback(remove, modules[path], install(modules[path], KIND, runs))

    def ran(self) -> set[str]:
        """Return the paths of the modules that ran since the last call."""
        found = {path for path, runs in self._runs.items() if int(runs)}
        for path in found:
            self._runs[path].zero_()
        return found

    def close(self) -> None:
        """Stop counting."""
        self._stack.close()


class Structure:
    """Weak references to the modules of a model, to detect a replaced module."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        held = submodules_of(modules)
        number = {id(None): len(modules)} | {id(module): number for number, module in enumerate(modules)}
        self._modules = [weakref.ref(module) for module in modules]
        self._counts = list(map(len, held))
        self._held = [number[id(module)] for each in held for module in each.values()]

    def matches(self, model: nn.Module) -> bool:
        """Return True if the model has the same modules in the same order; avoids Python loops, since it runs often."""
        modules: list[nn.Module | None] = list(map(operator.call, self._modules))
        if modules[0] is not model or None in modules:
            return False
        held = submodules_of(modules)  # type: ignore[arg-type]  # none of them is None here
        if list(map(len, held)) != self._counts:
            return False
        expected = map([*modules, None].__getitem__, self._held)
        return all(map(operator.is_, chain.from_iterable(map(dict.values, held)), expected))
