"""One parallel region in Python: threads that share a queue of tasks and run torch's operators single-threaded.

Torch's own parallelism forks and joins in every operator. Over small blocks that costs as much as the work, and
several times that whenever another process takes a core: at each join one thread waits for the one that lost it.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier, Lock
from typing import TypeVar

import torch

Task = TypeVar("Task")
_STARTING = Lock()


def share(work: Callable[[Iterator[Task]], None], tasks: Iterable[Task]) -> None:
    """Call `work` once on each of as many threads as torch has; whichever is free gets the next task.

    >>> done = []
    >>> share(lambda taken: done.extend(taken), range(5))
    >>> sorted(done)
    [0, 1, 2, 3, 4]
    """
    queue = deque(tasks)
    threads = 1 if torch.compiler.is_compiling() else torch.get_num_threads()
    if min(threads, len(queue)) < 2:
        work(_taken(queue))
        return
    with _STARTING:
        pool = _pool(threads)
    running = [pool.submit(work, _taken(queue)) for _ in range(min(threads, len(queue)))]
    for future in running:
        future.result()


def _taken(queue: deque[Task]) -> Iterator[Task]:
    while True:
        try:
            yield queue.popleft()
        except IndexError:
            return


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads in which every operator runs on that thread alone; kept, since MKL keeps buffers for each it has seen."""
    pool, started = ThreadPoolExecutor(threads, "attnscale"), Barrier(threads + 1)

    def start() -> None:
        torch.get_num_threads()  # torch sets a thread up when it first asks; asking later would undo the next line
        torch.set_num_threads(1)
        started.wait()

    for _ in range(threads):
        pool.submit(start)
    started.wait()
    torch.set_num_threads(threads)  # the number that new threads start from is one for the process
    return pool


if hasattr(os, "register_at_fork"):  # a forked child has none of the threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
