"""Tapes: the largest score of every head of a known model since they were last read, as one tensor."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from attnscale.inside.largest import BEHIND, CALLS, LOOK, blank_tape
from attnscale.inside.places import Places
from attnscale.torch_internals import copy_each_
from attnscale.watching.known.traces import Signature
from attnscale.watching.layer import Layer


@dataclass(frozen=True)
class _Line:
    """Where on all tapes, one behind the other, the heads of a call stand."""

    signature: Signature
    first: int


class Tapes:
    """One at each place where a model attends; a layer has its heads on one line, or on several that are alike."""

    def __init__(self, places: Places, layers: Mapping[str, Layer], limit: float, device: torch.device) -> None:
        self._places, self._tapes = places, dict[str, Tensor]()
        lines: dict[str, list[_Line]] = {}
        first = 0
        for path in places.modules:
            calls = places.known.orders[path].calls
            seen = [places.known.calls[signature] for signature in calls]
            heads = max(call.heads for call in seen)
            self._tapes[path] = blank_tape(heads, limit, [call.attends_itself for call in seen], device)
            lines[path] = [_Line(each, first + at * (heads + BEHIND)) for at, each in enumerate(calls)]
            first += self._tapes[path].numel()
        self._blank = [tape.clone() for tape in self._tapes.values()]
        self._flat = [tape.view(-1) for tape in self._tapes.values()]
        found = [where for layer in layers.values() for where in _heads(layer, lines)]
        most = max((len(where) for where in found), default=1)
        padded = [where + where[-1:] * (most - len(where)) for where in found]
        ends = torch.tensor([tape.numel() for tape in self._tapes.values()], dtype=torch.int64).cumsum(0)
        self._not_known = (ends + CALLS).to(device)  # where the last line of each counts
        self._at = torch.tensor(padded, dtype=torch.int64, device=device).reshape(-1, most)

    def looked_at(self) -> AbstractContextManager[None]:
        """Let the model write on them."""
        return self._places.looked_at(LOOK, self._tapes.__getitem__)

    def read(self) -> tuple[Tensor, Tensor]:
        """The largest score of each head of each layer that passed the limit, −∞ where none did; calls not known."""
        if not self._tapes:
            return torch.zeros(0), torch.zeros(())
        every = torch.cat(self._flat)
        return every[self._at].amax(-1), every[self._not_known].amax()

    def were_all_written(self) -> bool:
        """Whether the model attended at every place since they were wiped; waits for the device."""
        return all(bool((tape[:-1, CALLS] > 0).all()) for tape in self._tapes.values())

    def was_any_written(self) -> bool:
        """Whether it attended anywhere; waits for the device."""
        return any(bool((tape[:-1, CALLS] > 0).any()) for tape in self._tapes.values())

    def wipe_(self) -> None:
        """Begin anew."""
        copy_each_(list(self._tapes.values()), self._blank)


def _heads(layer: Layer, lines: Mapping[str, list[_Line]]) -> list[list[int]]:
    """Of each head of a layer, where its numbers stand; at every depth on the same lines."""
    path = layer.module if layer.module in lines else ""
    attentions = list(dict.fromkeys(line.signature for line in lines[path]))
    mine = attentions[layer.number - 1]
    return [[line.first + head for line in lines[path] if line.signature == mine] for head in range(layer.heads)]
