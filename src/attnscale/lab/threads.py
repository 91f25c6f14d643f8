"""One thread: for models so small that torch's threads would only wait for each other.

Each of their operations takes microseconds. Shared out, its parts meet at a barrier where threads spin until the last
has come; on busy cores that one may not be running, and an operation takes a time slice instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, and give torch its threads back afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
