"""Watcher: the dispatch mode that receives every operation of a model, to measure or trace it."""

import warnings
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnscale.declared import declared
from attnscale.errors import InputError, NotFollowedWarning, SettingError
from attnscale.module_paths import modules_by_path
from attnscale.numerics import has_nan_of_its_own
from attnscale.torch_internals import DispatchMode, in_backward, is_fake, local_part
from attnscale.tracing import Tracer, is_nested
from attnscale.tracing.following import are_outputs_of_one_projection
from attnscale.tracing.lineage import Lineage, Node, shape_of
from attnscale.tracing.roles import MixedValues, Scores, Softmax
from attnscale.tracing.softmaxes import OF_SDPA, PLAIN
from attnscale.watching.kernels import KernelCall, OpTraits, kernel_calls, traits_of
from attnscale.watching.layer import MeasuredCall
from attnscale.watching.layout import factors_before, own_factors, written_plan
from attnscale.watching.missed import MissedAttention, QueryKeyNorms, modules_that_never_attended
from attnscale.watching.module_stack import ModuleStack
from attnscale.watching.plan import PlanRecorder
from attnscale.watching.seen import Seen
from attnscale.watching.written_call import WrittenCall, written_call

DEFAULT_ROWS = 64
PLAIN_TENSORS = frozenset((Tensor, nn.Parameter))
NESTED = (
    "SDPA on nested tensors can be measured only if it runs a fused kernel on their values, as for jagged tensors on a "
    "GPU; elsewhere, use attnscale.attention, or SDPA with padding and a mask"
)
RAISE_FAILURES = False  # True in tests, where an operation that cannot be read is a bug


@dataclass(frozen=True)
class Settings:
    """Settings of a watched forward.

    `rows` are sampled per head and call; None measures all rows. `keep` stores queries, keys, values and masks of all
    calls. With `training`, calls in evaluation mode without gradients are skipped, and a plan for probes is recorded.
    """

    rows: int | None = DEFAULT_ROWS
    keep: bool = False
    training: bool = False
    may_be_empty: bool = False  # a model that runs without attention is no error

    def __post_init__(self) -> None:
        rows = self.rows
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise SettingError(f"Expected rows as a whole number of at least 1, or None for every row, got {rows!r}.")


class Watcher(DispatchMode):  # type: ignore[misc]  # torch's class is untyped
    """The dispatch mode between a model and torch's kernels."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's own check costs more than reading an operation

    def __init__(self, model: nn.Module, settings: Settings, seen: Seen | None = None) -> None:
        """Record calls in `seen`, which other recorders may share; by default in a new one."""
        super().__init__()
        lineage, modules = Lineage(ParameterNames(model)), modules_by_path(model)
        self.norms = QueryKeyNorms(modules, lineage)
        stack = self.stack = ModuleStack(modules, self._ran, self, settings.training)
        self.seen = Seen(stack.display_name, partial(declared, model), self.norms.unused) if seen is None else seen
        self.seen.misplaced_norms = self.norms.misplaced
        self.plan_recorder = PlanRecorder()
        self.reporter = Reporter(settings, stack, self.seen, self.plan_recorder)
        self.tracer = Tracer(lineage, lambda: tuple(stack.stack), self.reporter.softmax)
        self.failures: list[str] = []
        self._modules, self._settings = modules, settings

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, traits = kwargs or {}, traits_of(func)
        if in_backward() or not self.stack.stack or self.stack.is_over:
            return func(*args, **kwargs)  # in a backward pass, which may recompute calls, or outside the model
        if not PLAIN_TENSORS.issuperset(types) and any(map(_is_special, types)):
            if is_fake(types):
                return func(*args, **kwargs)  # without values: sharded tensors compute their layout with it
            return NotImplemented  # a sharded or quantised tensor: receive its inner operations instead
        if traits.is_composite and not (any(map(is_nested, args)) or _is_fused(traits, args)):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        try:
            self._read(traits, args, kwargs, result)
        except Exception as error:  # never break the user's forward
            self._note_failure(func, error)
        return result

    def _read(self, traits: OpTraits, args: Any, kwargs: Any, result: Any) -> None:
        if not self.norms.are_none:
            self.norms.note_operands(args, traits.name == "detach")
        if traits.is_kernel:
            self._read_kernel(traits, args, kwargs, result)
        elif is_nested(result) or any(map(is_nested, args)):
            if "softmax" in traits.name or "scaled_dot_product" in traits.name:
                self._refuse_nested()
        elif traits.name:
            self.tracer.read(traits.name, args, kwargs, result, traits.is_mutable)

    def _read_kernel(self, traits: OpTraits, args: Any, kwargs: Any, result: Any) -> None:
        results = result if isinstance(result, tuple) else ()
        by_name = dict(zip(traits.results, results, strict=False))
        by_name |= dict(zip(traits.arguments, args, strict=False)) | kwargs
        output, value = result[0] if isinstance(result, (tuple, list)) else result, by_name.get("value")
        if "scaled_dot_product" in traits.name and is_nested(by_name["query"]):
            self._refuse_nested()
            return
        for call in kernel_calls(self.tracer.lineage, traits.full_name, by_name):
            softmax = self.reporter.kernel(call)
            if not isinstance(output, Tensor):
                continue
            if isinstance(value, Tensor) and not (value.is_nested or call.has_finite_lse):
                softmax.measured(None, has_nan_of_its_own(output, value))
            self.tracer.lineage.write(output, Node(shape_of(output), learned=True, role=MixedValues(softmax)))

    def _refuse_nested(self) -> None:
        self.plan_recorder.give_up(NESTED)
        self.tracer.note_not_understood(self.tracer.module)

    def _ran(self, name: str, output: Any) -> None:
        try:
            self.norms.note_output(name, output)
            if not in_backward():  # checkpointing runs modules again
                self.plan_recorder.ran(name, self.stack.depth(name))
        except Exception as error:  # never break the user's forward
            self._note_failure(name, error)

    def _note_failure(self, what: Any, error: Exception) -> None:
        self.failures.append(f"{what}: {type(error).__name__}: {error}")
        if RAISE_FAILURES:
            raise error

    def conclude(self) -> None:
        """Warn about operations that could not be followed; raise if no attention was found."""
        seen, plan = self.seen, self.plan_recorder
        if self._settings.training and not self.failures and not self.tracer.unfollowed:
            seen.plan, seen.obstacle = plan.plan(self.stack.called, seen.unused_norms), plan.obstacle
        unfollowed = map(self.stack.display_name, self.tracer.unfollowed)
        seen.unfollowed = [path for path in unfollowed if path not in seen.layers]
        told = []
        if self.failures:
            told.append(f"{len(self.failures)} operations could not be followed; the first is {self.failures[0]}")
        if seen.unfollowed and seen.calls:
            told.append(
                f"{len(seen.unfollowed)} modules are left out, because their softmax mixes values but could not be "
                f"followed to a product of queries and keys: {', '.join(seen.unfollowed)}"
                + f". {NESTED}"
                * (plan.obstacle == NESTED)
            )
        is_allowed = self._settings.may_be_empty and self.stack.called
        if not seen.calls and is_allowed:
            told.append(f"Saw no attention: {self._nothing}.")
        for message in told:
            warnings.warn(message, NotFollowedWarning, stacklevel=4)
        if not seen.calls and not is_allowed:
            raise InputError(self._why_nothing())
        never = modules_that_never_attended(self._modules, seen.modules)
        nothing = "" if seen.calls else f"N{self._nothing[1:]}."
        seen.missed = MissedAttention(self.reporter.unread, tuple(seen.unfollowed), never, nothing)

    def _why_nothing(self) -> str:
        if not self.stack.called:
            where = " on this thread; it ran on another thread, which is not watched" * self.stack.ran_elsewhere
            return f"Expected the model to run inside watch(), but no module of it was called{where}."
        return (
            f"Expected attention in the watched model, but saw none: {self._nothing}. An empty batch or sequence, or a "
            "model on the meta device, has none."
        )

    @property
    def _nothing(self) -> str:
        if self.plan_recorder.obstacle == NESTED:
            return NESTED
        softmaxes = self.reporter.softmaxes
        which = f"none of {softmaxes} softmaxes" if softmaxes > 1 else "the one softmax that ran" if softmaxes else ""
        took = f"{which} took {'no' if softmaxes == 1 else 'a'} product of two activations"
        return f"no fused attention kernel ran, and {took if which else 'no softmax'}"


def _is_special(kind: type) -> bool:
    return issubclass(kind, Tensor) and kind not in PLAIN_TENSORS


def _is_fused(traits: OpTraits, args: Any) -> bool:
    """Return True if the device has a kernel for a composite operation, which rounds differently from its parts."""
    if not traits.fused_on:
        return False
    tensor = next((arg for arg in args if isinstance(arg, Tensor)), None)
    return tensor is not None and tensor.device.type in traits.fused_on


class ParameterNames:
    """Names of a model's parameters, including the tensors by which FSDP2 replaces them while a module runs."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._has_parts = model, False
        self._names: dict[int, tuple[Tensor, str]] = {}  # filled on first use

    def __call__(self, tensor: Tensor) -> str | None:
        """Return the first name of a parameter; None for other tensors."""
        may_be_new = isinstance(tensor, nn.Parameter) or (self._has_parts and tensor.is_leaf)  # FSDP2 creates new ones
        if not self._names or (may_be_new and id(tensor) not in self._names):
            self._names = self._look_up() | self._names
        return self._names.get(id(tensor), (tensor, None))[1]

    def _look_up(self) -> dict[int, tuple[Tensor, str]]:
        named = list(reversed(list(self._model.named_parameters(remove_duplicate=False))))
        # under tensor parallelism, a rank multiplies by its own part of a parameter
        local = [(name, part) for name, parameter in named if (part := local_part(parameter)) is not None]
        self._has_parts |= bool(local)
        return {id(tensor): (tensor, name) for name, tensor in [*local, *named]}


class Reporter:
    """Measure attention calls one by one, and record each under its module and line."""

    def __init__(self, settings: Settings, stack: ModuleStack, seen: Seen, plan: PlanRecorder) -> None:
        self._settings, self._stack, self._seen, self._plan = settings, stack, seen, plan
        self.softmaxes = 0  # number of softmaxes that ran
        self.unread: Counter[str] = Counter()  # softmaxes not followed to a product, by module

    def kernel(self, call: KernelCall) -> Softmax:
        """Measure a kernel call."""
        path = self._stack.innermost
        line, seen = self._stack.line_within(path), self._measure(call, path)
        if self._settings.training:
            self._plan.add_kernel(path, line, call, seen)
        if torch.is_grad_enabled():
            seen.gradients = call.gradients()
        self._seen.note(".".join(filter(None, (path, call.inside))), line, seen, self._stack.depth(path))
        return seen.softmax

    def softmax(self, scores: Tensor, node: Node, axis: int, by: str = "") -> Softmax | None:
        """Measure a hand-written attention; None if its softmax cannot be followed to a product."""
        self.softmaxes += 1
        axis %= max(scores.dim(), 1)
        product = node.role.of if isinstance(node.role, Scores) else None
        call = None if product is None else written_call(product, node, axis, scores)
        if product is None or call is None:
            if product is not None:  # other softmaxes are reported if they mix values
                self._plan.give_up("a softmax of a product could not be followed")
            if not are_outputs_of_one_projection(node, axis):  # not a loss or a router
                self.unread[self._stack.display_name(self._stack.innermost)] += 1
            return None
        # the innermost module that ran both at the product and at the softmax
        path = [a for a, b in zip(product.modules, self._stack.stack, strict=False) if a == b][-1]
        line, depth, seen = self._stack.line_within(path), self._stack.depth(path), self._measure(call, path)
        seen.kind, own = ("sdpa", own_factors(product)) if by == OF_SDPA else (seen.kind, None)
        if torch.is_grad_enabled():
            seen.gradients = call.gradients(1.0 if own is None else own[1])
        if self._settings.training:
            planned, shape = None, tuple(scores.shape)
            if by == OF_SDPA:
                seen.factors = factors_before(call, seen, shape)
            else:
                planned = written_plan(call, seen, shape) if by == PLAIN and not product.learned_query else None
                seen.factors = None if planned is None else seen.factors
            self._plan.add_written(path, line, seen, planned)
        seen.softmax = Softmax(
            axis,
            lambda: self._seen.note(path, line, seen, depth),
            waits=product.learned_query,
            rank=scores.dim(),
            keys_of=call.axes.key_channels if call.shares_keys else None,
            keep_values=None if seen.kept is None else partial(call.save_values, seen.kept),
        )
        product.has_softmax = True
        return seen.softmax

    def _measure(self, call: KernelCall | WrittenCall, path: str) -> MeasuredCall:
        if self._settings.training:
            self._seen.without_gradients |= not torch.is_grad_enabled()
            is_compiled, is_pinned = self._stack.compiled()
            self._seen.is_compiled |= is_compiled
            self._plan.ran_as(path, is_compiled, is_pinned, self._stack.depth(path))
        return call.measure(self._settings.rows, self._settings.keep)
