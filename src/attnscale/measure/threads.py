"""Threads that share a queue of tasks and run torch's operators single-threaded.

Torch's own parallelism forks and joins in every operator. For small blocks that costs as much as the work, and several
times as much if another process uses a core, because every join waits for the slowest thread.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier, Lock
from typing import TypeVar

import torch

from attnscale.torch_internals import in_transform

Task = TypeVar("Task")
_STARTING = Lock()


def share(work: Callable[[Iterator[Task]], None], tasks: Iterable[Task], threads: int) -> None:
    """Call `work` on up to this many threads, but no more than torch has; a free thread gets the next task.

    >>> done = []
    >>> share(done.extend, range(5), threads=2)
    >>> sorted(done)
    [0, 1, 2, 3, 4]
    """
    queue, most = deque(tasks), torch.get_num_threads()
    if min(most, threads) < 2 or torch.compiler.is_compiling() or in_transform():  # neither covers other threads
        work(_tasks_from(queue))
        return
    infers = torch.is_inference_mode_enabled()  # a new thread starts with the default

    def run() -> None:
        with torch.inference_mode(infers):
            work(_tasks_from(queue))

    with _STARTING:
        pool = _thread_pool(most)
    running = [pool.submit(run) for _ in range(min(threads, most, len(queue)))]
    for future in running:
        future.result()


def _tasks_from(queue: deque[Task]) -> Iterator[Task]:
    while True:
        try:
            yield queue.popleft()
        except IndexError:
            return


@cache
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    """Start threads that run every operator single-threaded; cached, since MKL never frees the buffers of a thread."""
    pool, started = ThreadPoolExecutor(threads, "attnscale"), Barrier(threads + 1)

    def start() -> None:
        torch.get_num_threads()  # the first call initialises the thread; made later, it would undo the next line
        torch.set_num_threads(1)
        started.wait()

    for _ in range(threads):
        pool.submit(start)
    started.wait()
    torch.set_num_threads(threads)  # the calls above also changed the default of the whole process
    return pool


if hasattr(os, "register_at_fork"):  # a forked child does not inherit the threads
    os.register_at_fork(after_in_child=_thread_pool.cache_clear)
