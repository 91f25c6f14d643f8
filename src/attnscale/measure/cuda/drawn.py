"""Draws of rows kept on a GPU."""

from functools import lru_cache

import torch
from torch import Tensor

from attnscale.measure.sampling import Design, Sample, rows_are_shared
from attnscale.torch_internals import current_stream

DRAWS_AHEAD = 256  # at most


class DrawnAhead:
    """Draws of one design kept on a GPU: the next one costs no copy, which would also stop a graph capture."""

    def __init__(self, planned: Design, batch: int, device: torch.device) -> None:
        self.planned, self.batch, self.device = planned, batch, device
        self.stream, self.raw = torch.cuda.current_stream(device), current_stream(device.index)  # of the copies
        self.drawn: tuple[Tensor, ...] = ()
        self.used = 0

    def next(self) -> Sample:
        """The next draw; under graph capture, where nothing can be copied, one of those at hand again."""
        if rows_are_shared():
            drawn = torch.tensor(self.planned.draw_each(self.batch), dtype=torch.int32)
            return self.planned.sample(drawn.to(self.device, non_blocking=True))
        capturing = torch.cuda.is_current_stream_capturing()
        if self.used == len(self.drawn):
            if not capturing or not self.drawn:
                self._draw(min(max(1, 2 * len(self.drawn)), DRAWS_AHEAD))  # few for a length not seen again
            self.used = 0
        positions = self.drawn[self.used]
        self.used += 1
        if capturing:
            CAPTURED.append(positions)
        elif current_stream(self.device.index) != self.raw:  # a stream itself takes long to ask for
            stream = torch.cuda.current_stream(self.device)
            stream.wait_stream(self.stream)
            positions.record_stream(stream)
        return self.planned.sample(positions)

    def _draw(self, count: int) -> None:
        draws = torch.from_numpy(self.planned.draws(count * self.batch)).unflatten(0, (count, self.batch))
        self.drawn = draws.to(self.device, non_blocking=True).unbind()
        self.stream, self.raw = torch.cuda.current_stream(self.device), current_stream(self.device.index)


CAPTURED: list[Tensor] = []  # a graph reads its positions at every replay, for as long as it lives


@lru_cache(maxsize=64)
def drawn_ahead(planned: Design, batch: int, device: torch.device) -> DrawnAhead:
    """The draws of a design for each entry of a batch, on a device."""
    return DrawnAhead(planned, batch, device)
