"""Pages of memory that a model on a CPU frees and takes again stay with the process while it is watched.

glibc gives what is free at the top of its heap back to the system where that is more than twice the largest block that
ever came from the system alone, say the two widest activations of a layer. A model by itself mostly finds the places it
had before. Small things that watching puts between them move its activations to the top, and each layer's were given
back and taken anew, page by page: thousands of faults in a forward that has hardly any by itself.
"""

from functools import cache

import torch
from torch import nn

LARGEST_HEEDED = 32 * 2**20  # bytes of a block from which glibc learns what to keep: twice as much
ROOM_FOR_ITS_OWN = 64 * 2**10  # what an allocator puts round a block


def keep_pages(model: nn.Module) -> None:
    """Have up to 64 MB of freed memory kept for whoever asks next, once in a process; nothing is written to."""
    if any(parameter.device.type == "cpu" for parameter in model.parameters()):
        _keep_pages()


@cache
def _keep_pages() -> None:
    torch.empty(LARGEST_HEEDED - ROOM_FOR_ITS_OWN, dtype=torch.uint8, device="cpu")
