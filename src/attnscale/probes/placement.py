"""Placement: the modules of a model in which a plan has probes placed, and those that fall back to the tracer."""

import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import chain

from torch import nn

from attnscale.module_paths import modules_by_path
from attnscale.probes.install import can_install, close_frames, install, plain_class, remove
from attnscale.probes.intercept import NO_LAYOUT, Carried
from attnscale.torch_internals import held_by
from attnscale.watching.plan import Plan
from attnscale.watching.sdpa_names import Redirected, names_of_sdpa


class Placement:
    """The probed modules of a model, by their path, and the fallback modules, which run under the tracer."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.model, self.plan, self.all_modules = model, plan, modules_by_path(model)
        self._is_found = all(path in self.all_modules for path in plan.attending)
        found = {path: self.all_modules[path] for path in sorted(plan.attending) if path in self.all_modules}
        self.modules = {path: found[path] for path in plan.modules if path in found and can_install(found[path])}
        self.fallbacks = {path: module for path, module in found.items() if path not in self.modules}
        files = {call.line[0] for each in plan.modules.values() for call in each.calls if call.line is not None}
        runs_eager = not all(each.is_compiled for each in plan.modules.values())
        self._names = names_of_sdpa(files) if runs_eager else []

    def obstacle(self) -> str:
        """Return why the model cannot be measured by this plan; empty where it can."""
        if not self._is_found or not self.modules:
            return "its attention modules are not where they were when it was traced"
        alone = (path for path in self.fallbacks if not self._can_run_alone(path))
        return next((f"{path or 'the model itself'}: {self.reason(path)}" for path in alone), "")

    def reason(self, path: str) -> str:
        """Return why a module falls back to the tracer."""
        return self.plan.fallbacks.get(path, "its forward was replaced")

    def _can_run_alone(self, path: str) -> bool:
        """Return True if the module can run uncompiled by itself: no other that attends is around it or inside it."""
        others = (other for other in (*self.modules, *self.fallbacks) if other != path)
        is_nested = any(f"{other}.".startswith(f"{path}.") or f"{path}.".startswith(f"{other}.") for other in others)
        return path not in self.plan.pinned and can_install(self.fallbacks[path]) and not is_nested

    @cached_property
    def late_modules(self) -> dict[str, nn.Module]:
        """Modules that did not run in the trace and may attend; not where others of their class ran and did not."""
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
    def probed(self, kind: str, carried: Callable[[str], Carried]) -> Iterator[None]:
        """Have a probe of this kind in every module; `carried` gives its tensors for the path of one."""
        with ExitStack() as stack:
            stack.callback(close_frames)
            stack.enter_context(Redirected(self._names))
            for path, module in self.modules.items():
                calls = self.plan.modules[path].calls
                layouts = " ".join(NO_LAYOUT if call.written is None else call.written.layout.code for call in calls)
                stack.callback(remove, module, install(module, kind, carried(path), layouts))
            yield


def _parents(path: str) -> Iterator[str]:
    parts = path.split(".")
    return (".".join(parts[:end]) for end in range(len(parts)))


def _may_attend(module: nn.Module) -> bool:
    """Return False for torch's own layers that hold no others."""
    is_torch_own = plain_class(module).__module__.startswith("torch.nn.")
    return can_install(module) and (not is_torch_own or any(module.children()))


class Structure:
    """The modules that a model holds, to notice when one is replaced; keeps none of them alive."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        held = list(map(held_by, modules))
        number = {id(None): len(modules)} | {id(module): number for number, module in enumerate(modules)}
        self._modules = [weakref.ref(module) for module in modules]
        self._counts = list(map(len, held))
        self._held = [number[id(module)] for module in chain.from_iterable(held)]

    def matches(self, model: nn.Module) -> bool:
        """Return True if the model holds the same modules in the same order; compared as whole lists, as it is hot."""
        modules = [reference() for reference in self._modules]
        if modules[0] is not model:
            return False
        held = [held_by(module) for module in modules if module is not None]
        if list(map(len, held)) != self._counts:
            return False
        by_number = [*modules, None]
        expected = (by_number[number] for number in self._held)
        return all(map(operator.is_, chain.from_iterable(held), expected))
