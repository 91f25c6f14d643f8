"""One thread: for models so small that torch's threads would only wait for each other.

Each of their operations takes microseconds. Shared out, its parts meet at a barrier where threads spin until the last
has come; on busy cores that one may not be running, and an operation takes a time slice instead.

On that thread numbers too small for all their digits are zero: a frozen softmax has gradients of that size, and a
processor takes ten times as long for them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread and without denormal numbers, and give torch both back afterwards."""
    threads, was_flushing = torch.get_num_threads(), _is_flushing()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_flushing)
        torch.set_num_threads(threads)


def _is_flushing() -> bool:
    """Whether denormal numbers are zero already; torch does not tell."""
    half_of_the_smallest_normal = torch.tensor(torch.finfo(torch.float32).tiny) / 2
    return not half_of_the_smallest_normal.item()
