"""Plan: what one traced forward found out about the attention calls of a model; probes are placed by it.

A trace follows every operation, which takes longer than a GPU takes to run the model. What it finds out about a call
stays the same from step to step: the module and the order of its calls, where queries and keys come from, which
constants multiply them, and which rows of which parameters make each head. A plan holds that and no tensors of the
model, so it can be pickled and kept.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor, nn

from attnscale.declared import Declared, declared
from attnscale.tracing.parameters import Origins
from attnscale.tracing.roles import Softmax
from attnscale.watching.kernels import KernelCall
from attnscale.watching.layer import Factors, MeasuredCall
from attnscale.watching.layout import WrittenPlan
from attnscale.watching.module_stack import Line
from attnscale.watching.sdpa_names import is_called_by_name

DIRECT = "it calls a kernel of SDPA by itself, or SDPA by a name of its own"
EIGHT = 8  # SDPA pads the head dimension to a multiple of this


@dataclass(frozen=True, eq=False)
class PlannedCall:
    """One attention call of a module: `template` is what the trace saw of it, without the numbers of that step."""

    module: str  # path
    line: Line
    template: MeasuredCall
    written: WrittenPlan | None = None  # of an attention that is written out; None: a kernel computes it
    key_heads: int = 0  # of the kernel's keys, which may be copies of fewer heads
    _head_factors: dict[int, Factors] = field(default_factory=dict, repr=False)  # by key heads

    @property
    def factors(self) -> tuple[Factors, Factors]:
        """Constants that multiply queries and keys between their projections and the call, a value a head."""
        assert self.template.factors is not None  # or it is not planned
        return self.template.factors

    def fits_kernel(self, query: Tensor, key: Tensor) -> bool:
        """Return True if a kernel call on these tensors has the heads that the trace saw.

        Inside a model's own run SDPA is seen with the keys and the head dimension that it was given: keys may not have
        been copied yet, nor heads padded.
        """
        (_, heads, _, width), keys, known = query.shape, key.shape[1], self.template
        widths = (width, -(-width // EIGHT) * EIGHT)
        is_alike = self.written is None and heads == known.heads and known.head_dim in widths
        return is_alike and (self.key_heads % keys == 0 or keys % self.key_heads == 0)

    def head_factors(self, keys: int) -> Factors:
        """Factors on the query of each head and on its key, (2, heads), where a call has so many key heads."""
        if keys not in self._head_factors:
            query, key = self.factors
            copies, shared = max(1, keys // len(key)), max(1, len(key) // keys)
            of_keys = np.repeat(np.repeat(key, copies)[::shared], len(query) // keys)
            self._head_factors[keys] = np.abs(np.stack([query, of_keys]))
        return self._head_factors[keys]

    def seen(self) -> MeasuredCall:
        """Return a new call like the one that was traced, whose numbers are to be filled in."""
        call = copy(self.template)
        call.softmax = copy(call.softmax)
        return call


@dataclass(frozen=True)
class ModulePlan:
    """The calls of one run of a module, in order."""

    calls: tuple[PlannedCall, ...]
    depth: int = 1  # runs of the module in one forward of the model
    is_compiled: bool = False  # torch.compile made what calls it


@dataclass(frozen=True)
class Plan:
    """The attention calls of a model, by the path of their module."""

    modules: Mapping[str, ModulePlan]
    fallbacks: Mapping[str, str]  # modules in which no probe can be placed, and the reason
    pinned: frozenset[str]  # modules that cannot run uncompiled by themselves: no graph may end there
    called: frozenset[str]  # all modules that ran
    unused_norms: Mapping[str, tuple[str, ...]]
    declarations: dict[tuple[str, int], Declared] = field(default_factory=dict)  # read when first asked for

    @property
    def attending(self) -> frozenset[str]:
        """Paths of the modules that attend."""
        return frozenset((*self.modules, *self.fallbacks))

    def declared(self, model: nn.Module, path: str, head_dim: int) -> Declared:
        """Return what the model declares about its scale there; reading it takes long, so it is read once."""
        if (path, head_dim) not in self.declarations:
            self.declarations[path, head_dim] = declared(model, path, head_dim)
        return self.declarations[path, head_dim]


class PlanRecorder:
    """Collects the plan while a model is traced."""

    def __init__(self) -> None:
        self._calls: dict[tuple[object, ...], PlannedCall] = {}  # by place and shape
        self._running: dict[str, list[PlannedCall]] = {}  # calls of the present run of each module
        self._found: dict[str, ModulePlan] = {}
        self._compiled: set[str] = set()
        self._pinned: set[str] = set()
        self._fallbacks: dict[str, str] = {}
        self.obstacle = ""  # why there is no plan; empty where there is one

    def give_up(self, reason: str) -> None:
        """Record that something ran which no plan can describe."""
        self.obstacle = self.obstacle or reason

    def add_kernel(self, path: str, line: Line, kernel: KernelCall, seen: MeasuredCall) -> None:
        """Record a call of a fused kernel."""
        if kernel.kind == "sdpa" and not self._is_seen_by_probes(path):
            self._fall_back(path, DIRECT)
        elif kernel.kind != "sdpa":
            self._fall_back(path, f"{kernel.kind} kernels take no probe")
        elif kernel.heads_in_batch is not None:
            self._fall_back(path, "its heads stand in the place of the batch")
        elif seen.factors is None:
            self._fall_back(path, "what multiplies its queries or keys is no constant")
        elif seen.wiring.biased:
            self._fall_back(path, "a bias is added to its scores")
        else:
            self._add(path, line, seen, None, kernel.key.shape[1])

    def add_written(self, path: str, line: Line, seen: MeasuredCall, layout: WrittenPlan | None) -> None:
        """Record an attention that is written out, or that SDPA computed by its parts: then it has no layout."""
        if seen.kind == "sdpa" and not self._is_seen_by_probes(path):
            self._fall_back(path, DIRECT)
        elif seen.factors is None:
            self._fall_back(path, "its scores are not a plain multiple of q·k")
        else:
            self._add(path, line, seen, layout, len(seen.factors[1]))

    def _is_seen_by_probes(self, path: str) -> bool:
        """Return True if a probe will see SDPA's function: in a graph, or by its name."""
        return path in self._compiled or is_called_by_name()

    def _add(self, path: str, line: Line, seen: MeasuredCall, layout: WrittenPlan | None, key_heads: int) -> None:
        place = (path, line, seen.kind, seen.heads, key_heads, seen.head_dim, seen.first_row)
        if place not in self._calls:
            self._calls[place] = PlannedCall(path, line, seen, layout, key_heads)
        self._running.setdefault(path, []).append(self._calls[place])

    def _fall_back(self, path: str, reason: str) -> None:
        self._fallbacks.setdefault(path, reason)

    def ran_as(self, path: str, is_compiled: bool, is_pinned: bool, depth: int) -> None:
        """Record how a module that attends is called: what is called twice in a forward cannot run by itself."""
        if is_compiled:
            self._compiled.add(path)
        if not path or depth or is_pinned:
            self._pinned.add(path)

    def ran(self, path: str, depth: int) -> None:
        """Record that a module has run, after so many runs of it in the same forward."""
        calls, known = tuple(self._running.pop(path, ())), self._found.get(path)
        if known is None and not calls:
            return
        if known is not None and known.calls != calls:
            self._fall_back(path, "it attends differently from run to run")
        depth = max(depth + 1, 1 if known is None else known.depth)
        self._found[path] = ModulePlan(calls, depth, path in self._compiled)

    def plan(self, called: set[str], unused_norms: Callable[[str], tuple[str, ...]]) -> Plan | None:
        """Return the plan; None where the whole model has to be traced every time."""
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
    """Return a call without anything that belongs to one step, or that holds tensors of the model."""
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
        softmax=_facts(call.softmax),
    )


def _facts(softmax: Softmax) -> Softmax:
    return replace(softmax, attends=None, keep_values=None, keys_of=None, values=None, off_one=None, undefined=None)
