"""What runs a ragged batch: torch's kernels for all sequences at once, each sequence after the other, or in a graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnscale.attending import flex, varlen
from attnscale.attending.choosing import as_autocast, run
from attnscale.attending.ragged import Ragged
from attnscale.attending.sequences_op import ARGUMENTS, arguments_of, attended, backward, output_of, ragged_of, save
from attnscale.inputs import refuse_vmap
from attnscale.numerics import without_autocast
from attnscale.torch_internals import unseen, without_modes


def run_sequences(ragged: Ragged) -> Tensor:
    """The output of every sequence, (1, heads, total, value_dim): all at once on a GPU, else one after the other."""
    cast = replace(ragged, row=as_autocast(ragged.row))
    if varlen.serves(cast):
        with without_autocast(cast.row.query):
            return varlen.attend(cast)
    if unseen(ragged.rows.offsets):
        refuse_vmap(ragged.rows.offsets, ragged.keys.offsets)
        output: Tensor = attend_sequences(*arguments_of(cast))
        return output
    return joined([run(call) for call in ragged.calls()], ragged)


def joined(outputs: list[Tensor], ragged: Ragged) -> Tensor:
    """The outputs of the sequences in one row."""
    return torch.cat(outputs, dim=-2) if outputs else output_of(ragged.row.query, ragged.row.value)


@contextmanager
def in_operator() -> Iterator[None]:
    """As a node of a graph runs: nobody looks on at what is inside it, and nothing is compiled."""
    with without_modes(), flex.nothing_compiled():
        yield


@torch.library.custom_op("attnscale::attend_sequences", mutates_args=(), schema=f"({ARGUMENTS}) -> Tensor")
def attend_sequences(*given: Any) -> Tensor:
    """run_sequences() as a node of a graph."""
    with in_operator():
        return attended(*ragged_of(*given), run_sequences)


@attend_sequences.register_fake
def _attend_sequences_fake(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> Tensor:
    return output_of(query, value)


attend_sequences.register_autograd(backward, setup_context=save)
