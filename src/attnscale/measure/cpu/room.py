"""Memory for scores, kept for the next pass of the same thread: to touch new pages takes longer than to fill them."""

import threading

import torch
from torch import Tensor

from attnscale.measure.cpu.threads import usable

MOST = 2**20  # numbers that are kept: 4 MB a thread
_OWN = threading.local()


def room_for(size: int, like: Tensor) -> Tensor:
    """So many numbers of anything, for as long as the pass lasts that asks.

    >>> room_for(3, torch.empty(0)).data_ptr() == room_for(2, torch.empty(0)).data_ptr()
    True
    """
    is_plain = type(like) is Tensor and like.dtype == torch.float32 and like.device.type == "cpu"
    if not is_plain or size > MOST or not usable():
        return like.new_empty(size)
    kept: Tensor | None = getattr(_OWN, "room", None)
    if kept is None or len(kept) < size:
        with torch.inference_mode(False):  # it is used outside it too
            _OWN.room = kept = torch.empty(size, dtype=like.dtype, device=like.device)
    return kept[:size]
