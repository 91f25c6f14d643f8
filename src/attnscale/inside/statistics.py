"""The statistics of a sampled step, measured where a known model attends.

Each module that attends carries a ticket: the number of its place, in the host's memory, so that the operator knows
where it stands in whichever graph it runs, and how often it was passed. What a backward pass recomputes is not counted
again. An operator is kept in a graph for what it changes, of a forward that count, or for what is made of its result:
in a backward a zero, which is added to the gradient. (To claim that the gradient is changed loses tensors where CUDA
graphs are cut.) What a backward needs must not change until it runs, and another forward may come before: so it is
given the number of the place alone, and nothing that an operator of the forward returns, which a checkpoint would ask
again.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attnscale.inside.frames import LOOKS, Look
from attnscale.inside.given import FUNCTIONS, Given, Modified
from attnscale.inside.written import Written
from attnscale.torch_internals import in_backward
from attnscale.visibility import Visibility
from attnscale.watching.gradients import GradientLengths
from attnscale.watching.kernels import KernelCall
from attnscale.watching.kernels.flex import modification
from attnscale.watching.written.again import WrittenAgain
from attnscale.watching.written.layout import layout_from

LOOK = "statistics"


Lengths = GradientLengths | None  # None where no backward is to come


class Recorder(Protocol):
    """What calls at one place are handed to."""

    def note(self, number: int, call: KernelCall | WrittenAgain, gradients: Lengths, is_compiled: bool) -> None:
        """A call of the module, this one in its run."""
        ...

    def passed(self, first: Tensor, second: Tensor) -> None:
        """Gradients have passed: of queries and keys, or of a product's operands, of the last call that waits."""
        ...

    def add(self, lengths: GradientLengths, number: int, first: Tensor, second: Tensor) -> None:
        """The same, of this call."""
        ...


_PLACES: WeakValueDictionary[int, Recorder] = WeakValueDictionary()
_NUMBERS = count()


Ticket = tuple[Tensor, Tensor]  # the number of a place, and how often it was passed


def ticket_of(recorder: Recorder) -> Ticket:
    """That of a new place."""
    number = next(_NUMBERS)
    _PLACES[number] = recorder
    return torch.tensor([number]), torch.tensor([0])


@torch.library.custom_op("attnscale::noted", mutates_args=("passed",), tags=(torch.Tag.cudagraph_unsafe,))
def noted(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    hidden_keys: Tensor | None,
    place: Tensor,
    passed: Tensor,
    scale: float,
    is_causal: bool,
    number: int,
    learns: bool,
) -> None:
    """Measure a call, inside a compiled graph."""
    _note(Given(query, key, mask, hidden_keys, is_causal, scale, lambda *_: None), (place, passed), number, learns)


@noted.register_fake
def _(*_: Any) -> None:
    return None


@torch.library.custom_op("attnscale::noted_modified", mutates_args=("passed",), tags=(torch.Tag.cudagraph_unsafe,))
def noted_modified(
    query: Tensor,
    key: Tensor,
    buffers: list[Tensor],
    place: Tensor,
    passed: Tensor,
    scale: float,
    functions: int,
    score_buffers: int,
    number: int,
    learns: bool,
) -> None:
    """Measure a call of FlexAttention; of its buffers the first belong to what changes scores.

    An operator of its own: in a checkpoint inductor loses a list among the arguments.
    """
    modified = Modified(functions, tuple(buffers[:score_buffers]), tuple(buffers[score_buffers:]))
    _note(Given(query, key, None, None, False, scale, lambda *_: None, modified), (place, passed), number, learns)


@noted_modified.register_fake
def _(*_: Any) -> None:
    return None


@torch.library.custom_op("attnscale::noted_written", mutates_args=("passed",), tags=(torch.Tag.cudagraph_unsafe,))
def noted_written(
    scores: Tensor, left: Tensor, right: Tensor, place: Tensor, passed: Tensor, layout: str, number: int, learns: bool
) -> None:
    """Measure an attention written out, inside a compiled graph."""
    _note(WrittenAgain(scores, left, right, layout_from(layout)), (place, passed), number, learns)


@noted_written.register_fake
def _(*_: Any) -> None:
    return None


def _note(call: Given | WrittenAgain, ticket: Ticket, number: int, learns: bool) -> None:
    place, passed = ticket
    passed += 1
    recorder = None if in_backward() else _PLACES.get(int(place))
    if recorder is not None:
        found = _kernel(call) if isinstance(call, Given) else call
        recorder.note(number, found, GradientLengths() if learns else None, is_compiled=True)


@torch.library.custom_op("attnscale::noted_gradient", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def noted_gradient(first: Tensor, second: Tensor, place: Tensor) -> Tensor:
    """Add up the gradients that reached the queries and keys of a call, or the operands of its product; a zero."""
    recorder = _PLACES.get(int(place))
    if recorder is not None:
        recorder.passed(first, second)
    return first.new_zeros(())


@noted_gradient.register_fake
def _(first: Tensor, *_: Any) -> Tensor:
    return first.new_empty(())


class _Followed(torch.autograd.Function):
    """Queries and keys as they are, whose gradients are noted as they pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        ctx.place = place
        return query.view_as(query), key.view_as(key)

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, None]:
        return query + noted_gradient(query, key, ctx.place), key, None


def _look(given: Given, ticket: Ticket, number: int, is_traced: bool) -> Given:
    query, key = given.query, given.key
    learns = torch.is_grad_enabled() and query.requires_grad and key.requires_grad
    if is_traced and type(ticket[0]) is not Tensor:
        detached = query.detach(), key.detach()
        if given.modified is None:
            noted(*detached, given.mask, given.hidden_keys, *ticket, given.scale, given.is_causal, number, learns)
        else:
            own = given.modified.score_buffers
            buffers = [buffer.detach() for buffer in (*own, *given.modified.mask_buffers)]
            functions = given.modified.functions
            noted_modified(*detached, buffers, *ticket, given.scale, functions, len(own), number, learns)
        if learns:
            query, key = _Followed.apply(query, key, ticket[0])  # type: ignore[no-untyped-call]
        return replace(given, query=query, key=key)
    kernel = _kernel(replace(given, query=query.detach(), key=key.detach()))
    _note_eagerly(kernel, ticket, number, (query, key) if learns else None)
    return given


def _look_at_softmax(written: Written, ticket: Ticket, number: int, is_traced: bool) -> None:
    tensors = written.scores.detach(), written.left.detach(), written.right.detach()
    operands = written.left, written.right
    learns = torch.is_grad_enabled() and all(operand.requires_grad for operand in operands)
    if is_traced and type(ticket[0]) is not Tensor:
        noted_written(*tensors, *ticket, written.layout, number, learns)
        if learns:
            _follow_both(operands, lambda left, right: noted_gradient(left, right, ticket[0]))
    else:
        again = WrittenAgain(*tensors, layout_from(written.layout))
        _note_eagerly(again, ticket, number, operands if learns else None)


def _note_eagerly(
    call: KernelCall | WrittenAgain, ticket: Ticket, number: int, learning: tuple[Tensor, Tensor] | None
) -> None:
    """Measure a call where it is made, and follow what reaches those that learn."""
    recorder = None if in_backward() else _PLACES.get(int(ticket[0]))
    if recorder is None:
        return
    lengths = None if learning is None else GradientLengths()
    recorder.note(number, call, lengths, is_compiled=False)
    if learning is not None and lengths is not None:
        _follow_both(learning, partial(recorder.add, lengths, number))


def _follow_both(tensors: tuple[Tensor, Tensor], told: Callable[[Tensor, Tensor], Tensor | None]) -> None:
    """Tell of both gradients when they have passed; a zero that comes back goes with the second."""
    passed: dict[int, Tensor] = {}

    def note(side: int, gradient: Tensor) -> Tensor | None:
        passed[side] = gradient.detach()
        if len(passed) < len(tensors):
            return None
        with torch.no_grad():
            zero = told(passed.pop(0), passed.pop(1))
        return None if zero is None else gradient + zero

    for side, tensor in enumerate(tensors):
        tensor.register_hook(partial(note, side))


def _kernel(given: Given) -> KernelCall:
    if given.modified is None:
        seen = Visibility.of(given.mask, given.is_causal)
        return KernelCall("sdpa", given.query, given.key, given.scale, visibility=seen, hidden=given.hidden_keys)
    buffers = given.modified.score_buffers, given.modified.mask_buffers
    modify = modification(*FUNCTIONS[given.modified.functions], *buffers, is_traced=True)
    return KernelCall("flex", given.query, given.key, given.scale, score_mod=modify)


LOOKS[LOOK] = Look(_look, _look_at_softmax)
