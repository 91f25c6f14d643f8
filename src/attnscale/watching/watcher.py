"""watch(model): see every attention of a running model, with no edit to it.

One mode between the model and torch's kernels sees each operation after it ran, and follows tensors from projections
to products to softmaxes. Nothing is replaced, so outputs stay as they are to the last bit.
"""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnscale.declared import declared
from attnscale.errors import InputError, NotFollowedWarning, SettingError
from attnscale.measure.sampling import same_rows
from attnscale.torch_internals import BIAS_CLASS_UNDER_MODES, QUIET_ABOUT_HOOKS, UNCOMPILED
from attnscale.tracing.lineage import Ledger, Node, shape_of
from attnscale.tracing.operations import Operation, read
from attnscale.tracing.operations.products import convolved, read_outer_sum, read_product
from attnscale.tracing.operations.softmaxes import Softmax
from attnscale.tracing.place import Place, within
from attnscale.watching.call import Sighting
from attnscale.watching.gradients import of_kernel
from attnscale.watching.kernels.kernel import Kernel
from attnscale.watching.kernels.reading import flex_call, kernel_calls
from attnscale.watching.known.graph import is_legible, kernels_behind, now
from attnscale.watching.known.model import Recognised, remembered, signature
from attnscale.watching.known.traces import Signature, Traces
from attnscale.watching.op_traits import SOFTMAXES, kind_of
from attnscale.watching.qk_norms import QueryKeyNorms
from attnscale.watching.running import ParameterNames, Running
from attnscale.watching.seen import Seen
from attnscale.watching.shards import Shard
from attnscale.watching.written.attention import Written, see_softmax

DEFAULT_ROWS = 64
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}  # where the two operands stand
SPECIAL = {*PRODUCTS, *SOFTMAXES, "convolution", "_log_softmax", "exp", "div", "mul", "sum"}


@contextmanager
def watch(
    model: nn.Module,
    rows: int | None = DEFAULT_ROWS,
    *,
    keep: bool = False,
    training: bool = False,
    seed: int | None = None,
    known: Recognised | None = None,
) -> Iterator[Seen]:
    """See every attention that runs inside the model, whatever computes it.

    `rows` are sampled per head and call, None looks at all of them; `keep` holds on to queries and keys of the last
    call. With `training`, calls in evaluation mode without gradients are left out, and backward passes leave the
    gradients that reached queries and keys. With a `seed` the rows sampled depend on it and on the length of the
    queries alone, and each call is kept by itself: for ranks that share out keys. With `known`, the
    `recognised` of an earlier watch of this model, only kernels that it tells of are looked at, and what is new is
    followed. Compiled parts of the model run uncompiled meanwhile. Where nothing was seen, leaving raises.

    >>> from torch import nn
    >>> layer = nn.MultiheadAttention(64, 2, batch_first=True)
    >>> x = torch.randn(1, 10, 64)
    >>> with watch(layer) as seen:
    ...     _ = layer(x, x, x)
    >>> round(1 / seen.layers["MultiheadAttention"].scale_applied ** 2)
    32
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"Expected a torch.nn.Module to watch, got {type(model).__name__}.")
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise SettingError(f"Expected rows as a whole number of at least 1, or None for every row, got {rows!r}.")
    watcher = Watcher(model, rows, keep, training, seed, known)
    with ExitStack() as stack:
        for held in (UNCOMPILED, QUIET_ABOUT_HOOKS, BIAS_CLASS_UNDER_MODES):
            stack.enter_context(held)
        watcher.running.attach()
        stack.callback(watcher.running.detach)
        yield watcher.seen
    watcher.conclude()


class Watcher(TorchDispatchMode):
    """The mode that reads every operation."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled meanwhile, and asking costs more than reading most operations

    def __init__(
        self,
        model: nn.Module,
        rows: int | None,
        keep: bool,
        training: bool = False,
        seed: int | None = None,
        known: Recognised | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger(ParameterNames(model))
        self.norms = QueryKeyNorms(model, self.ledger)
        self.known = known
        self.only_known = False  # nothing but known kernels is looked at in the module that is running
        self.attending = frozenset() if known is None else known.attending
        begins = (lambda name: True) if known is None else self._begins
        passed_over = () if known is None else known.called - known.attending
        self.running = Running(model, self._ran, self, training, begins, passed_over)
        unused = self.norms.unused if known is None else lambda path: known.unused_norms.get(path, ())
        self.seen = Seen(self.running.shown, lambda path, head_dim: declared(model, path, head_dim), unused)
        self.calls: dict[Signature, Sighting] = {}  # kernels that were followed
        self.traces = Traces()
        self.reads_graph = training and seed is None and not keep  # and not only what a mode sees
        self.can_be_recognised = True  # so far: all attention was kernels
        self.rows, self.keep, self.training, self.seed = rows, keep, training, seed
        self.softmaxes = 0  # of anything
        self.failures: list[str] = []

    def _begins(self, name: str) -> bool:
        """Whether to look at what runs in a module: a kernel that is known, or all of a module that is not."""
        assert self.known is not None
        self.only_known = name in self.attending
        if self.reads_graph and name in self.known.traces and is_legible():
            return False  # its kernel is read from the graph when it has run
        return self.only_known or name not in self.known.called

    def _ran(self, name: str, output: Any) -> None:
        """A module has run."""
        if self.known is None:
            self.norms.ran(name, output)
        if not self.reads_graph:
            return
        try:
            if self.known is None:
                self.traces.ran(name, output, self.running.began[-1])
            elif name in self.known.traces and not self.running.is_watched and is_legible():
                self._see_trace(name, output)
        except Exception as error:  # a model that runs must go on running
            self._failed(name, error)

    def _see_trace(self, name: str, output: Any) -> None:
        """The kernel of a known module, from the graph; measured when its gradient passes, when a GPU has work."""
        assert self.known is not None
        trace, began = self.known.traces[name], self.running.began[-1]
        if now() - began not in trace.lengths:  # it does not run as it did: all is followed the next time
            self.can_be_recognised = False
        kernel = next(kernels_behind(output, began), None)
        call = None
        if kernel is not None and trace.fits(kernel):
            call = self.known.later(kernel, trace.signature, self.rows)
        if kernel is None or call is None:
            self.can_be_recognised = False
            return
        call.sighting.gradients = of_kernel(kernel.query, kernel.key, call.measure)
        self.seen.note_later(name, trace.line, call)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.only_known and not kind_of(func).may_attend:
            return func(*args, **kwargs)
        if torch._C._current_graph_task_id() != -1 or not self.running.stack:
            return func(*args, **kwargs)  # a backward pass, which recomputes perhaps; or no part of the model
        if types and any(issubclass(kind, Tensor) and kind not in (Tensor, nn.Parameter) for kind in types):
            if FakeTensor in types:
                return func(*args, **kwargs)  # shapes alone: sharded tensors work out their layout with it
            return NotImplemented  # a sharded or quantised tensor: see what it does inside
        if _is_taken_apart(func, args):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        try:
            self._read(func, args, kwargs, result)
        except Exception as error:  # a model that runs must go on running
            self._failed(func, error)
        return result

    def _failed(self, what: Any, error: Exception) -> None:
        self.failures.append(f"{what}: {type(error).__name__}: {error}")
        if RAISE_FAILURES:
            raise error

    def _read(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        kind = kind_of(func)
        if kind.is_flex:
            self.can_be_recognised = False
            self._see_kernel(flex_call(self.ledger, args), result)
        if not kind.name:
            return
        if self.norms.built:
            self._mark_used(kind.name, args)
        if kind.is_kernel:
            for kernel in kernel_calls(
                self.ledger, kind.full_name, dict(zip(kind.arguments, args, strict=False)) | kwargs
            ):
                self._see_kernel(kernel, result)
            return
        if self.only_known:  # a softmax where there was none
            self.can_be_recognised = False
            return
        operation = Operation(kind.name, args, kwargs, result, self.ledger)
        node = (self._special(operation) if kind.name in SPECIAL else None) or read(operation)
        if isinstance(node, Node):
            self._after_softmax(node)
            if kind.is_mutable and isinstance(args[0], Tensor):
                self.ledger.write_through(self.ledger.node(args[0]), node)
            if isinstance(result, Tensor):
                self.ledger.write(result, node)
            return
        for tensor, its in zip(result, node, strict=False):
            if isinstance(tensor, Tensor) and its is not None:
                self.ledger.write(tensor, its)

    def _special(self, op: Operation) -> Node | None:
        """Products, softmaxes and what is written in their place; None for all else."""
        if op.name in PRODUCTS:
            first, second = (op.args[index] for index in PRODUCTS[op.name])
            alpha, beta = op.kwargs.get("alpha", 1.0), op.kwargs.get("beta", 1.0)
            bias = op.args[0] * beta if op.name == "baddbmm" and beta else None
            self._notice_lost(self.ledger.node(first), self.ledger.node(second))
            added = op.node() if op.name in ("addmm", "baddbmm") and beta else None
            return read_product(self.ledger, self.running.place(), (first, second), op.shape, alpha, bias, added)
        if op.name == "convolution":
            bias = op.argument(2, "bias")
            return convolved(op.node(1), op.shape, None if bias is None else self.ledger.node(bias))
        if op.name in SOFTMAXES:
            softmax = self._see_softmax(op.args[0], op.node(), op.argument(1, "dim", -1))
            if softmax is None and op.node().learned:
                return Node(op.shape, learned=True, lost=self.running.stack[-1])
            if softmax is not None and op.name == "_safe_softmax":
                softmax.sighting.kind = "sdpa"  # its path in plain operations, which alone takes this softmax
            return self._weights(op, softmax)
        if op.name == "_log_softmax":
            return self._log_weights(op, self._see_softmax(op.args[0], op.node(), op.argument(1, "dim", -1)))
        if op.name == "exp":
            return self._see_exponential(op)
        if op.name in ("div", "mul"):
            return self._see_division(op)
        if op.name == "sum" and op.node().outer is not None:
            return self._see_outer_sum(op)
        return None

    def _notice_lost(self, *operands: Node) -> None:
        """Weights of unknown origin that mix activations: an attention that was not followed."""
        if all(operand.learned for operand in operands):
            self.seen.unfollowed += [
                node.lost for node in operands if node.lost and node.lost not in self.seen.unfollowed
            ]

    def _see_softmax(self, scores: Tensor, node: Node, axis: int) -> Softmax | None:
        self.softmaxes += 1
        axis %= max(scores.dim(), 1)
        self.can_be_recognised = False
        written = None if node.scores is None else see_softmax(node.scores, scores, node, axis)
        if written is None or node.scores is None:
            return None
        path, line = within(node.scores.place, self.running.place()), self.running.place().line
        sighting = self._measured(written, self.running.place())
        assert sighting is not None
        softmax = Softmax(sighting, axis)
        if self.training:
            softmax.sighting.gradients = written.gradients()
        softmax.report = lambda sighting: self.seen.note(path, line, sighting)
        softmax.waits = node.scores.learned_query
        return softmax

    def _weights(self, op: Operation, softmax: Softmax | None) -> Node | None:
        if softmax is None:
            return None
        softmax.ran()
        return Node(op.shape, learned=True, weights=softmax)

    def _log_weights(self, op: Operation, softmax: Softmax | None) -> Node | None:
        return None if softmax is None else Node(op.shape, learned=True, log_weights=softmax)

    def _see_exponential(self, op: Operation) -> Node | None:
        """exp(log_softmax(z)), or exp(z − logsumexp(z))."""
        node = op.node()
        if node.log_weights is not None:
            return self._weights(op, node.log_weights)
        if node.log_softmax_axis is not None:
            return self._weights(op, self._see_softmax(op.args[0], node, node.log_softmax_axis))
        return None

    def _see_division(self, op: Operation) -> Node | None:
        """e / Σe, which is a softmax: written as a division, as a product with the inverse, or after mixing values."""
        if not all(isinstance(arg, Tensor) for arg in op.args[:2]):
            return None
        (top, powers), (bottom, _) = ((op.node(side), op.args[side]) for side in (0, 1))
        if op.name == "mul" and top.sum_of is not None:
            (top, powers), bottom = (bottom, op.args[1]), top
        if bottom.sum_of is None:
            return None
        mixed = top.mixed_by_powers
        top, powers = mixed or (top, powers)
        if top.exponent is None or bottom.sum_of[0] is not top.exponent:
            return None
        softmax = self._see_softmax(powers.reshape(top.exponent.shape).log(), top.exponent, bottom.sum_of[1])
        if mixed is None or softmax is None:
            return self._weights(op, softmax)
        softmax.ran()
        return Node(op.shape, learned=True, mixed=softmax)

    def _see_outer_sum(self, op: Operation) -> Node | None:
        """Products, and mixtures of values, written as a multiplication and a sum."""
        parent, axes = op.node(), op.argument(1, "dim")
        axis = axes % len(parent.shape) if isinstance(axes, int) else axes[0] % len(parent.shape) if axes else 0
        assert parent.outer is not None
        if parent.weights is not None:
            parent.weights.mixes(parent, axis)
            return Node(op.shape, learned=True, mixed=parent.weights)
        if op.argument(2, "keepdim", False):
            return None
        first, second = (self.ledger.node(operand) for operand in parent.outer)
        return read_outer_sum(self.running.place(), parent, (first, second), axis, op.shape)

    def _see_kernel(self, kernel: Kernel, result: Any) -> None:
        place = self.running.place()
        sighting = self._measured(kernel, place)
        if sighting is None:  # not known, and nothing that made its operands was followed
            self.can_be_recognised = False
            return
        if not self.only_known:
            self.calls[signature(kernel, place)] = sighting
            if self.reads_graph:
                self.traces.saw(signature(kernel, place), kernel)
        if self.training:
            sighting.gradients = of_kernel(kernel.query, kernel.key)
        self.seen.note(".".join(filter(None, (place.modules[-1], kernel.inside))), place.line, sighting)
        output = result[0] if isinstance(result, (tuple, list)) else result
        if isinstance(output, Tensor):
            self.ledger.write(output, Node(shape_of(output), learned=True, mixed=Softmax(sighting, -1)))

    def _measured(self, call: Kernel | Written, place: Place) -> Sighting | None:
        if self.training and not torch.is_grad_enabled():
            self.seen.without_gradients = True
        with nullcontext() if self.seed is None else same_rows(self.seed):
            if self.only_known and self.known is not None and isinstance(call, Kernel):
                sighting = self.known.sighting(call, signature(call, place), self.rows)
            else:
                sighting = call.sighting(self.rows, self.keep)
        if self.seed is not None and sighting is not None:
            sighting.shard = Shard.of(sighting, *call.some())
        return sighting

    def _after_softmax(self, node: Node) -> None:
        """The mixed values multiplied by a constant: the scores should have been."""
        if node.mixed is not None and node.steps:
            step = node.steps[0]
            if step.effect in ("times", "over") and isinstance(step.operand, float):
                node.mixed.scaled(step.operand if step.effect == "times" else 1.0 / step.operand)

    def _mark_used(self, name: str, args: Any) -> None:
        if name != "detach":
            for arg in args:
                for item in arg if isinstance(arg, (list, tuple)) else (arg,):
                    if isinstance(item, Tensor):
                        self.ledger.node(item).used = True

    def conclude(self) -> None:
        """Say what could not be followed; where nothing was seen at all, refuse."""
        self.seen.settle()
        self.failures += self.seen.left_out
        if self.can_be_recognised and not self.failures and not self.seen.unfollowed:
            if self.known is None:
                self.seen.recognised = remembered(
                    self.running.called, self.calls, self.seen.unused_norms, self.traces.legible
                )
            elif not self.calls:  # something new is followed with all the rest, the next time
                self.seen.recognised = self.known
        if self.failures:
            told = f"{len(self.failures)} operations could not be followed, the first: {self.failures[0]}"
            warnings.warn(told, NotFollowedWarning, stacklevel=4)
        left_out = [path for path in map(self.running.shown, self.seen.unfollowed) if path not in self.seen.layers]
        if left_out and self.seen.calls:
            warnings.warn(
                f"{len(left_out)} modules mix values by a softmax that could not be followed to a product of queries "
                f"and keys, and are left out: {', '.join(left_out)}",
                NotFollowedWarning,
                stacklevel=4,
            )
        if self.seen.calls:
            return
        if not self.running.called:
            raise InputError("Expected the model to run inside watch(), but no module of it was called.")
        raise InputError(
            "Expected attention in the watched model, but saw none: no fused attention kernel ran, and "
            + (f"none of its {self.softmaxes} softmaxes" if self.softmaxes else "no softmax")
            + " took a product of two activations. An empty batch or sequence, or a model on the meta device, has none."
        )


def _is_taken_apart(func: Any, args: Any) -> bool:
    """Whether an operation runs as those it is made of: not where its device has one kernel for it."""
    kind = kind_of(func)
    if not (kind.is_composite and kind.fused_on):
        return kind.is_composite
    tensor = next((arg for arg in args if isinstance(arg, Tensor)), None)
    return tensor is None or tensor.device.type not in kind.fused_on


RAISE_FAILURES = False  # for tests: an operation that cannot be read is a defect
