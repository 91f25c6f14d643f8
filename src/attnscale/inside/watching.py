"""A known model, watched inside its run: its modules carry a look while that lasts, and each call becomes one seen."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from attnscale.errors import InputError, NotFollowedWarning
from attnscale.inside.apart import Apart
from attnscale.inside.places import Places
from attnscale.inside.statistics import LOOK, ticket_of
from attnscale.inside.unseen import Unseen
from attnscale.numerics import without_autocast
from attnscale.torch_internals import backward_number, node_in_backward, recorded_operations
from attnscale.watching.call import SeenCall
from attnscale.watching.gradients import GradientLengths
from attnscale.watching.kernels import KernelCall
from attnscale.watching.known.known_model import KnownModel
from attnscale.watching.known.orders import Order
from attnscale.watching.known.traces import Signature
from attnscale.watching.reporter import measured
from attnscale.watching.seen import Seen
from attnscale.watching.settings import Settings
from attnscale.watching.written.again import WrittenAgain


@contextmanager
def watched_inside(places: Places, settings: Settings) -> Iterator[Seen]:
    """See every attention that runs in a known model, as watch() does."""
    watching = _Watching(places.model, places.known, settings)
    unseen = Unseen(places.unseen)
    try:
        with (
            watching.apart.followed(places.apart),
            places.looked_at(LOOK, lambda path: ticket_of(watching.place(path))),
        ):
            yield watching.seen
    finally:
        unseen.leave()
    watching.failures += (f"{path}: it did not run when the model was followed" for path in sorted(unseen.ran_since()))
    watching.seen.apart = tuple(places.apart)
    watching.conclude()


class _Watching:
    """One sampled step."""

    def __init__(self, model: nn.Module, known: KnownModel, settings: Settings) -> None:
        root = type(model).__name__
        self.known, self.settings = known, settings
        self.seen = Seen(
            lambda path: path or root,
            partial(known.declared, model),
            lambda path: known.unused_norms.get(path, ()),
        )
        self.apart = Apart(model, settings, self.seen)
        self.failures: list[str] = []
        self._places: list[_Place] = []

    def place(self, path: str) -> "_Place":
        """Where the module at this path hands its calls to."""
        self._places.append(_Place(self, path, self.known.orders[path]))
        return self._places[-1]

    def conclude(self) -> None:
        """Say what was missed; where nothing was seen at all, refuse."""
        self.seen.is_inside = True
        self.seen.settle()
        self.failures += self.apart.failures
        if not self.seen.calls and not self.failures:
            raise InputError("Expected the model to run, but none of its attentions did.")
        missed = [each.path for each in self._places if not each.runs]
        self._places.clear()  # which hold this
        failures = [*self.failures, *(f"{path}: it attended otherwise than before" for path in missed)]
        self.seen.known_model = None if failures else self.known
        if failures:
            warnings.warn(
                f"{len(failures)} attentions could not be measured inside the model, and will be followed from outside "
                f"again; the first: {failures[0]}",
                NotFollowedWarning,
                stacklevel=4,
            )


@dataclass(eq=False)
class _ToPass:
    """A call in a compiled graph, whose gradient is to come."""

    lengths: GradientLengths
    known_by: Signature | None
    node: int  # of autograd's, for the graph that it is in
    backward: int | None = None  # in which one came


class _Place:
    """A module that attends: which of its calls is which."""

    def __init__(self, watching: _Watching, path: str, order: Order) -> None:
        self._watching, self.path, self._order = watching, path, order
        self.runs = 0
        self._to_pass: list[_ToPass] = []  # of compiled calls
        self._backward = -1
        self._recomputed: list[tuple[SeenCall, Signature]] = []  # whose gradient comes from another run of the same

    def note(
        self, number: int, call: KernelCall | WrittenAgain, gradients: GradientLengths | None, is_compiled: bool
    ) -> None:
        """A call of the module, this one in its run; None where no backward is to come."""
        self.runs += number == 0
        known_by = self._order.calls[number] if number < len(self._order.calls) else None
        if gradients is None:
            self._watching.seen.without_gradients |= not is_compiled
        elif is_compiled:
            node = recorded_operations() - 1  # that of the graph, which autograd makes before it runs
            self._to_pass.append(_ToPass(gradients, known_by, node))
        try:
            self._note(known_by, call, gradients)
        except Exception as error:  # a model that runs must go on running
            self._watching.failures.append(f"{self.path}: {type(error).__name__}: {error}")

    def _note(
        self, known_by: Signature | None, given: KernelCall | WrittenAgain, gradients: GradientLengths | None
    ) -> None:
        seen, known, settings = self._watching.seen, self._watching.known, self._watching.settings
        if known_by is None or not known.fits(given, known_by):
            self._watching.failures.append(f"{self.path}: it attended otherwise than before")
            return
        with torch.no_grad(), without_autocast(given.left if isinstance(given, WrittenAgain) else given.query):
            call = measured(settings, given, lambda: known.again(given, known_by, settings.rows))
        assert call is not None
        call.gradients = gradients
        if gradients is None:
            self._recomputed.append((call, known_by))
        seen.note(self.path, known_by[1], call, (self.runs - 1) % self._order.depth)  # type: ignore[arg-type]

    def passed(self, first: Tensor, second: Tensor) -> None:
        """Gradients have passed: of queries and keys, or of a product's operands, of the last call that waits."""
        waiting = self._waiting()
        if waiting is not None:
            waiting.backward = self._backward
            self._add(waiting.lengths, waiting.known_by, first, second)
        elif self._recomputed:
            call, known_by = self._recomputed.pop()
            call.gradients = GradientLengths()
            self._add(call.gradients, known_by, first, second)

    def _waiting(self) -> "_ToPass | None":
        """The last call in the graph whose backward runs that has no gradient of it yet; else one that never had any.

        A graph that is kept may have several backwards.
        """
        self._backward, node = backward_number(), node_in_backward()
        mine = (each for each in reversed(self._to_pass) if each.node == node and each.backward != self._backward)
        others = (each for each in reversed(self._to_pass) if each.backward is None)
        return next(mine, None) or next(others, None)

    def add(self, lengths: GradientLengths, number: int, first: Tensor, second: Tensor) -> None:
        """The same, of this call."""
        self._add(lengths, self._order.calls[number] if number < len(self._order.calls) else None, first, second)

    def _add(self, lengths: GradientLengths, known_by: Signature | None, first: Tensor, second: Tensor) -> None:
        if known_by is not None:
            query, key = self._watching.known.operands(known_by, first, second)
            owners = self._watching.known.calls[known_by].key_owners
            lengths.add_both(query, key, owners)
