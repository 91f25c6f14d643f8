"""Watcher: the mode that sees every operation of a model, and hands each on: kernels, and all else to be traced."""

import warnings
import weakref
from functools import partial
from typing import Any

from torch import Tensor, nn

from attnscale.declared import declared
from attnscale.errors import InputError, NotFollowedWarning
from attnscale.module_paths import modules_by_path
from attnscale.numerics import has_nan_of_its_own
from attnscale.torch_internals import DispatchMode, in_backward, is_fake, local_part
from attnscale.tracing.lineage import Ledger, Node, shape_of
from attnscale.tracing.nested import NestedTensors, any_nested, is_nested
from attnscale.tracing.roles import Mixed
from attnscale.tracing.tracer import Tracer
from attnscale.watching.kernels import KernelCall, kernel_calls
from attnscale.watching.kernels.sdpa import NESTED_OPERATIONS, multiplied, sequences
from attnscale.watching.op_traits import OpTraits, traits_of
from attnscale.watching.overlooked import Overlooked, unseen_attentions
from attnscale.watching.plan import PlanRecorder
from attnscale.watching.qk_norms import QueryKeyNorms
from attnscale.watching.reporter import Reporter
from attnscale.watching.running import Running
from attnscale.watching.seen import Seen
from attnscale.watching.settings import Settings

PLAIN_TENSORS = frozenset((Tensor, nn.Parameter))
RAISE_FAILURES = False  # for tests: an operation that cannot be read is a defect


class Watcher(DispatchMode):  # type: ignore[misc]  # torch's own, untyped
    """The mode between a model and torch's kernels."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled meanwhile, and asking costs more than reading most operations

    def __init__(self, model: nn.Module, settings: Settings, seen: Seen | None = None) -> None:
        """What is seen is noted in `seen`, where others note too; in one of its own where none is given."""
        super().__init__()
        ledger, modules = Ledger(ParameterNames(model)), modules_by_path(model)
        self.norms = QueryKeyNorms(modules, ledger)
        running = self.running = Running(model, modules, self._ran, self, settings.training)
        self.seen = Seen(running.shown, partial(declared, model), self.norms.unused) if seen is None else seen
        self.plan_recorder = PlanRecorder()
        self.reporter = Reporter(settings, running, self.seen, self.plan_recorder)
        self.tracer = Tracer(ledger, lambda: tuple(running.stack), self.reporter.softmax)
        self.nested = NestedTensors(self.tracer)
        self.failures: list[str] = []
        self._modules, self._settings = modules, settings

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, traits = kwargs or {}, traits_of(func)
        if in_backward() or not self.running.stack or self.running.is_over:
            return func(*args, **kwargs)  # a backward pass, which recomputes perhaps; or no part of the model
        if not PLAIN_TENSORS.issuperset(types) and any(map(_is_special, types)):
            if is_fake(types):
                return func(*args, **kwargs)  # shapes alone: sharded tensors work out where they lie with it
            return NotImplemented  # a sharded or quantised tensor: see what it does inside
        if traits.is_composite and self._takes_apart(traits, args, kwargs):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        try:
            self._hand_on(traits, args, kwargs, result)
        except Exception as error:  # a model that runs must go on running
            self._failed(func, error)
        return result

    def _takes_apart(self, traits: OpTraits, args: Any, kwargs: Any) -> bool:
        """Whether an operation made of others runs as those: not where it is read as one, or is one to its operands."""
        if any_nested(args) or _is_fused(traits, args):
            return False
        return not self.tracer.reads_whole(traits.name, args, kwargs)

    def _hand_on(self, traits: OpTraits, args: Any, kwargs: Any, result: Any) -> None:
        if self.norms.built and traits.name != "detach":
            self.norms.took(args)
        if (not traits.is_kernel or traits.name in NESTED_OPERATIONS) and (is_nested(result) or any_nested(args)):
            self._hand_on_nested(traits, args, kwargs, result)
        elif traits.is_kernel:
            given = dict(zip(traits.arguments, args, strict=False)) | kwargs
            results = result if isinstance(result, tuple) else ()
            found = dict(zip(traits.results, results, strict=False))
            for call in kernel_calls(self.tracer.ledger, traits.full_name, found | given):
                self._report(call, given.get("value"), result)
        elif traits.name:
            self.tracer.read(traits.name, args, kwargs, result, traits.is_mutable)

    def _hand_on_nested(self, traits: OpTraits, args: Any, kwargs: Any, result: Any) -> None:
        """Nested tensors are followed sequence by sequence."""
        ledger, calls = self.tracer.ledger, list[KernelCall]()
        if traits.name in NESTED_OPERATIONS:
            given = dict(zip(traits.arguments, args, strict=False)) | kwargs
            parts = [self.nested.of(given[name]).tensors for name in ("query", "key", "value")]
            calls = list(sequences(ledger, given, parts))
        elif traits.name == "matmul" and all(map(is_nested, args[:2])):
            calls = list(multiplied(ledger, self.nested.of(args[0]), self.nested.of(args[1])))
        self.nested.read(traits.name, args, kwargs, result)
        output = result[0] if isinstance(result, (tuple, list)) else result
        for call in calls:
            self.plan_recorder.give_up("it attends to nested tensors, which no probe takes")
            self.nested.mixed(output, self.reporter.kernel(call))

    def _report(self, call: KernelCall, value: Any, result: Any) -> None:
        softmax = self.reporter.kernel(call)
        output = result[0] if isinstance(result, (tuple, list)) else result
        if isinstance(output, Tensor):
            if isinstance(value, Tensor) and not (value.is_nested or call.has_finite_lse):
                softmax.measured(None, has_nan_of_its_own(output, value))
            self.tracer.ledger.write(output, Node(shape_of(output), learned=True, role=Mixed(softmax)))

    def _ran(self, name: str, output: Any) -> None:
        """A module has run."""
        try:
            self.norms.ran(name, output)
            if not in_backward():  # which runs modules again
                self.plan_recorder.ran(name, self.running.depth(name))
        except Exception as error:  # a model that runs must go on running
            self._failed(name, error)

    def _failed(self, what: Any, error: Exception) -> None:
        self.failures.append(f"{what}: {type(error).__name__}: {error}")
        if RAISE_FAILURES:
            raise error

    def conclude(self) -> None:
        """Say what could not be followed; where nothing was seen at all, refuse."""
        self.seen.settle()
        unfollowed = self.tracer.unfollowed
        if self._settings.training and not self.failures and not unfollowed:
            self.seen.plan = self.plan_recorder.plan(self.running.called, self.seen.unused_norms)
            self.seen.obstacle = self.plan_recorder.obstacle
        self.seen.unfollowed = [path for path in map(self.running.shown, unfollowed) if path not in self.seen.layers]
        if self.failures:
            warnings.warn(
                f"{len(self.failures)} operations could not be followed, the first: {self.failures[0]}",
                NotFollowedWarning,
                stacklevel=4,
            )
        if self.seen.unfollowed and self.seen.calls:
            warnings.warn(
                f"{len(self.seen.unfollowed)} modules mix values by a softmax that could not be followed to a product "
                f"of queries and keys, and are left out: {', '.join(self.seen.unfollowed)}",
                NotFollowedWarning,
                stacklevel=4,
            )
        if not self.seen.calls and not (self._settings.may_be_empty and self.running.called):
            raise InputError(self._why_nothing())
        self.seen.overlooked = Overlooked(
            self.reporter.unread,
            tuple(self.seen.unfollowed),
            unseen_attentions(self._modules, self.seen.modules),
            "" if self.seen.calls else f"N{self._nothing[1:]}.",
        )

    def _why_nothing(self) -> str:
        if not self.running.called:
            where = " on this thread; it ran on another thread, which is not watched" * self.running.ran_elsewhere
            return f"Expected the model to run inside watch(), but no module of it was called{where}."
        return (
            f"Expected attention in the watched model, but saw none: {self._nothing}. An empty batch or sequence, or a "
            "model on the meta device, has none."
        )

    @property
    def _nothing(self) -> str:
        softmaxes = self.reporter.softmaxes
        which = f"none of {softmaxes} softmaxes" if softmaxes > 1 else "the one softmax that ran" if softmaxes else ""
        took = f"{which} took {'no' if softmaxes == 1 else 'a'} product of two activations"
        return f"no fused attention kernel ran, and {took if which else 'no softmax'}"


def _is_special(kind: type) -> bool:
    return issubclass(kind, Tensor) and kind not in PLAIN_TENSORS


def _is_fused(traits: OpTraits, args: Any) -> bool:
    """Whether its device has an operation for it all the same."""
    if not traits.fused_on:
        return False
    tensor = next((arg for arg in args if isinstance(arg, Tensor)), None)
    return tensor is not None and tensor.device.type in traits.fused_on


class ParameterNames:
    """Parameters of a model -> their names; under FSDP2 a running module holds others than one at rest."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._has_parts = model, False
        self._known: dict[int, tuple[Tensor, str]] = {}  # asked for when the first is met
        self._others: dict[int, weakref.ref[Tensor]] = {}  # tensors that were looked for and are none

    def _now(self) -> dict[int, tuple[Tensor, str]]:
        named = list(reversed(list(self._model.named_parameters(remove_duplicate=False))))
        # a rank that holds some heads of a layer multiplies by its own part of the parameter
        local = [(name, part) for name, parameter in named if (part := local_part(parameter)) is not None]
        self._has_parts |= bool(local)
        return {id(tensor): (tensor, name) for name, tensor in [*local, *named]}

    def __call__(self, tensor: Tensor) -> str | None:
        """The name, the first of several; None for what is no parameter of the model."""
        if not self._known or (id(tensor) not in self._known and self._may_be_one(tensor)):
            self._known = self._now() | self._known
            if id(tensor) not in self._known and self._has_parts:
                self._others[id(tensor)] = weakref.ref(tensor)
        return self._known.get(id(tensor), (tensor, None))[1]

    def _may_be_one(self, tensor: Tensor) -> bool:
        """Whether to look again: also for a plain tensor where parameters have local parts, which FSDP2 makes anew."""
        if isinstance(tensor, nn.Parameter) or not self._has_parts:
            return isinstance(tensor, nn.Parameter)
        refused = self._others.get(id(tensor))
        return tensor.is_leaf and (refused is None or refused() is not tensor)
