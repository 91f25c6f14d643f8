"""Plan: facts about the attention calls of a model, found by one traced forward and used to place probes.

A trace follows every operation, which takes longer than the model itself on a GPU. Most facts about a call do not
change between steps: the module and the order of its calls, the origin of queries and keys, the constants that
multiply them, and the rows of parameters that make each head. A plan holds these facts and no tensors of the model, so
it can be pickled and stored.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor, nn

from attnscale.declared import Declared, declared
from attnscale.tracing.parameters import Origins
from attnscale.watching.kernels import KernelCall
from attnscale.watching.layer import Factors, MeasuredCall
from attnscale.watching.layout import WrittenPlan
from attnscale.watching.module_stack import Line
from attnscale.watching.sdpa_names import is_called_by_name

DIRECT = "it calls an SDPA kernel directly, or SDPA by a name of its own"
PADDED_TO = 8  # SDPA pads the head dimension to a multiple of this


@dataclass(frozen=True, eq=False)
class PlannedCall:
    """One attention call of a module; `template` is the traced call without the measurements of that step."""

    module: str  # path
    line: Line
    template: MeasuredCall
    written: WrittenPlan | None = None  # for hand-written attention; None: a kernel computes it
    _head_factors: dict[int, Factors] = field(default_factory=dict, repr=False)  # by number of key heads

    @property
    def factors(self) -> tuple[Factors, Factors]:
        """Constants that multiply queries and keys between projection and call, one value per head."""
        assert self.template.factors is not None  # calls without factors are not planned
        return self.template.factors

    @property
    def key_heads(self) -> int:
        """Number of heads of the kernel's keys, which may be copies of fewer heads."""
        return len(self.factors[1])

    def fits_kernel(self, query: Tensor, key: Tensor) -> bool:
        """Return True if a kernel call on these tensors has the traced number and width of heads.

        A probe sees SDPA's arguments before SDPA repeats shared keys and pads heads; the trace sees them after.
        """
        (_, heads, _, width), keys, traced = query.shape, key.shape[1], self.template
        widths = (width, -(-width // PADDED_TO) * PADDED_TO)
        is_alike = self.written is None and heads == traced.heads and traced.head_dim in widths
        return is_alike and (self.key_heads % keys == 0 or keys % self.key_heads == 0)

    def head_factors(self, keys: int) -> Factors:
        """Return factors on each head's query and key, (2, heads), for a call with this number of key heads."""
        if keys not in self._head_factors:
            query, key = self.factors
            copies, shared = max(1, keys // len(key)), max(1, len(key) // keys)
            of_keys = np.repeat(np.repeat(key, copies)[::shared], len(query) // keys)
            self._head_factors[keys] = np.abs(np.stack([query, of_keys]))
        return self._head_factors[keys]

    def seen(self) -> MeasuredCall:
        """Return a copy of the traced call, to be filled with new measurements."""
        call = copy(self.template)
        call.softmax = copy(call.softmax)
        return call


@dataclass(frozen=True)
class ModulePlan:
    """The calls of one run of a module, in order."""

    calls: tuple[PlannedCall, ...]
    depth: int = 1  # runs of the module in one forward of the model
    is_compiled: bool = False  # it runs in compiled code


@dataclass(frozen=True)
class Plan:
    """The attention calls of a model, by the path of their module."""

    modules: Mapping[str, ModulePlan]
    fallbacks: Mapping[str, str]  # modules in which no probe can be placed, with the reason
    pinned: frozenset[str]  # modules that cannot run uncompiled alone, because no graph break is allowed there
    called: frozenset[str]  # all modules that ran
    unused_norms: Mapping[str, tuple[str, ...]]
    declarations: dict[tuple[str, int], Declared] = field(default_factory=dict)  # read on first access

    @property
    def attending(self) -> frozenset[str]:
        """Paths of the modules that attend."""
        return frozenset((*self.modules, *self.fallbacks))

    def declared(self, model: nn.Module, path: str, head_dim: int) -> Declared:
        """Return the scale that the model declares for a module; cached, because reading it is slow."""
        if (path, head_dim) not in self.declarations:
            self.declarations[path, head_dim] = declared(model, path, head_dim)
        return self.declarations[path, head_dim]


class PlanRecorder:
    """Collect the plan while a model is traced."""

    def __init__(self) -> None:
        self._calls: dict[tuple[object, ...], PlannedCall] = {}  # by code location and shape
        self._running: dict[str, list[PlannedCall]] = {}  # calls in the current run of each module
        self._found: dict[str, ModulePlan] = {}
        self._compiled: set[str] = set()
        self._pinned: set[str] = set()
        self._fallbacks: dict[str, str] = {}
        self.obstacle = ""  # why there is no plan; empty if there is one

    def give_up(self, reason: str) -> None:
        """Record why no plan is possible; the first reason is kept."""
        self.obstacle = self.obstacle or reason

    def add_kernel(self, path: str, line: Line, kernel: KernelCall, seen: MeasuredCall) -> None:
        """Record a call of a fused kernel."""
        obstacles = {
            "FlexAttention that is not compiled takes no probe": kernel.kind == "flex" and path not in self._compiled,
            f"{kernel.kind} kernels take no probe": kernel.kind not in ("sdpa", "flex"),
            "its heads are merged into the batch axis": kernel.heads_in_batch is not None,
            "the factors on its queries or keys are not constant": seen.factors is None,
            "a bias is added to its scores": seen.wiring.biased,
        }
        self._add(path, line, seen, None, next((reason for reason, holds in obstacles.items() if holds), ""))

    def add_written(self, path: str, line: Line, seen: MeasuredCall, layout: WrittenPlan | None) -> None:
        """Record a hand-written attention, or one that SDPA computed from plain operations (without a layout)."""
        if seen.factors is not None:
            seen.highest_bias = 0.0  # any remainder is rounding
        self._add(path, line, seen, layout, "" if seen.factors else "its scores are not a plain multiple of q·k")

    def _add(self, path: str, line: Line, seen: MeasuredCall, layout: WrittenPlan | None, obstacle: str) -> None:
        if seen.kind == "sdpa" and path not in self._compiled and not is_called_by_name():
            obstacle = DIRECT
        if obstacle:
            self._fallbacks.setdefault(path, obstacle)
            return
        call = PlannedCall(path, line, seen, layout)
        place = (path, line, seen.kind, seen.heads, call.key_heads, seen.head_dim, seen.first_row)
        self._running.setdefault(path, []).append(self._calls.setdefault(place, call))

    def ran_as(self, path: str, is_compiled: bool, is_pinned: bool, depth: int) -> None:
        """Record how an attending module is called; one called twice per forward cannot run uncompiled alone."""
        if is_compiled:
            self._compiled.add(path)
        if not path or depth or is_pinned:
            self._pinned.add(path)

    def ran(self, path: str, depth: int) -> None:
        """Record that a module has run; `depth` counts its earlier runs in the same forward."""
        calls, known = tuple(self._running.pop(path, ())), self._found.get(path)
        if known is None and not calls:
            return
        if known is not None and known.calls != calls:
            self._fallbacks.setdefault(path, "its attention calls differ between runs")
        depth = max(depth + 1, 1 if known is None else known.depth)
        self._found[path] = ModulePlan(calls, depth, path in self._compiled)

    def plan(self, called: set[str], unused_norms: Callable[[str], tuple[str, ...]]) -> Plan | None:
        """Return the plan; None if the whole model must be traced at every step."""
        templates = {id(call): replace(call, template=_template(call.template)) for call in self._calls.values()}
        modules = {
            path: replace(module, calls=tuple(templates[id(call)] for call in module.calls))
            for path, module in self._found.items()
            if path not in self._fallbacks
        }
        alone = {path: reason for path, reason in self._fallbacks.items() if path in self._pinned or not modules}
        for path, reason in alone.items():
            self.give_up(f"{path or 'the model itself'}: {reason}")
        if self.obstacle or not modules:
            return None
        unused = {path: unused_norms(path) for path in (*modules, *self._fallbacks)}
        return Plan(modules, self._fallbacks, frozenset(self._pinned), frozenset(called), unused)


def _template(call: MeasuredCall) -> MeasuredCall:
    """Return the call without measurements of one step and without tensors of the model."""
    origins = call.origins_of_all
    return replace(
        call,
        stats=None,  # type: ignore[arg-type]
        scales=None,  # type: ignore[arg-type]
        query_norm=None,  # type: ignore[arg-type]
        key_norm=None,  # type: ignore[arg-type]
        cosine=None,
        kept=None,
        gradients=None,
        padding=None,
        origins=Origins(*(side and side.resolved() for side in (origins.query, origins.key, origins.value))),
        softmax=replace(
            call.softmax, attends=None, keep_values=None, keys_of=None, values=None, off_one=None, undefined=None
        ),
    )
