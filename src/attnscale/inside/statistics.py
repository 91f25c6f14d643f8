"""The statistics of a sampled step, measured where a known model attends.

Each module that attends carries a ticket: the number of its place, in the host's memory, so that the operator knows
where it stands in whichever graph it runs. What a backward pass recomputes is not counted again.
"""

from dataclasses import replace
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attnscale.inside.frames import LOOKS
from attnscale.inside.given import FUNCTIONS, Given, Modified
from attnscale.torch_internals import in_backward
from attnscale.visibility import Visibility
from attnscale.watching.gradients import GradientSquares, by_query_head, of_kernel
from attnscale.watching.kernels import KernelCall
from attnscale.watching.kernels.flex import modification

LOOK = "statistics"


class Recorder(Protocol):
    """What calls at one place are handed to."""

    def note(self, number: int, kernel: KernelCall, gradients: GradientSquares | None, is_compiled: bool) -> None:
        """A call of the module, this one in its run; None where no backward is to come."""
        ...

    def passing(self) -> GradientSquares | None:
        """Those of the last call whose gradient did not pass yet."""
        ...


_PLACES: WeakValueDictionary[int, Recorder] = WeakValueDictionary()
_NUMBERS = count()


def ticket_of(recorder: Recorder) -> Tensor:
    """The number of a place, and how often it was passed."""
    number = next(_NUMBERS)
    _PLACES[number] = recorder
    return torch.tensor([number, 0])


@torch.library.custom_op("attnscale::noted", mutates_args=("ticket",), tags=(torch.Tag.cudagraph_unsafe,))
def noted(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    ticket: Tensor,
    scale: float,
    is_causal: bool,
    number: int,
    learns: bool,
) -> None:
    """Measure a call, inside a compiled graph."""
    _note(Given(query, key, mask, is_causal, scale, lambda *_: None), ticket, number, learns)


@noted.register_fake
def _(*_: Any) -> None:
    return None


@torch.library.custom_op("attnscale::noted_modified", mutates_args=("ticket",), tags=(torch.Tag.cudagraph_unsafe,))
def noted_modified(
    query: Tensor,
    key: Tensor,
    buffers: list[Tensor],
    ticket: Tensor,
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
    _note(Given(query, key, None, False, scale, lambda *_: None, modified), ticket, number, learns)


@noted_modified.register_fake
def _(*_: Any) -> None:
    return None


def _note(given: Given, ticket: Tensor, number: int, learns: bool) -> None:
    ticket[1] += 1
    recorder = None if in_backward() else _PLACES.get(int(ticket[0]))
    if recorder is not None:
        recorder.note(number, _kernel(given), GradientSquares() if learns else None, is_compiled=True)


@torch.library.custom_op("attnscale::noted_gradient", mutates_args=("ticket",), tags=(torch.Tag.cudagraph_unsafe,))
def noted_gradient(query: Tensor, key: Tensor, ticket: Tensor) -> None:
    """Add up the gradients that reached the queries and keys of a call."""
    ticket[1] += 1
    recorder = _PLACES.get(int(ticket[0]))
    squares = None if recorder is None else recorder.passing()
    if squares is not None:
        squares.add("query", by_query_head(query))
        squares.add("key", by_query_head(key, query.shape[1] // max(key.shape[1], 1)))


@noted_gradient.register_fake
def _(*_: Any) -> None:
    return None


class _Followed(torch.autograd.Function):
    """Queries and keys as they are, whose gradients are noted as they pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, ticket: Tensor) -> tuple[Tensor, Tensor]:
        ctx.ticket = ticket
        return query.view_as(query), key.view_as(key)

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, None]:
        noted_gradient(query, key, ctx.ticket)
        return query, key, None


def _look(given: Given, ticket: Tensor, number: int, is_traced: bool) -> Given:
    query, key = given.query, given.key
    learns = torch.is_grad_enabled() and query.requires_grad and key.requires_grad
    if is_traced and type(ticket) is not Tensor:
        detached = query.detach(), key.detach()
        if given.modified is None:
            noted(*detached, given.mask, ticket, given.scale, given.is_causal, number, learns)
        else:
            own = given.modified.score_buffers
            buffers = [buffer.detach() for buffer in (*own, *given.modified.mask_buffers)]
            noted_modified(*detached, buffers, ticket, given.scale, given.modified.functions, len(own), number, learns)
        if learns:
            query, key = _Followed.apply(query, key, ticket)  # type: ignore[no-untyped-call]
        return replace(given, query=query, key=key)
    recorder = None if in_backward() else _PLACES.get(int(ticket[0]))
    if recorder is not None:
        kernel = _kernel(replace(given, query=query.detach(), key=key.detach()))
        recorder.note(number, kernel, of_kernel(query, key) if learns else None, is_compiled=False)
    return given


def _kernel(given: Given) -> KernelCall:
    if given.modified is None:
        seen = Visibility.of(given.mask, given.is_causal)
        return KernelCall("sdpa", given.query, given.key, given.scale, visibility=seen)
    buffers = given.modified.score_buffers, given.modified.mask_buffers
    modify = modification(*FUNCTIONS[given.modified.functions], *buffers, is_traced=True)
    return KernelCall("flex", given.query, given.key, given.scale, score_mod=modify)


LOOKS[LOOK] = _look
