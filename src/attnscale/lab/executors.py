"""Executors for sweeps: a local pool of processes, or an executor from the user's own code."""

import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from attnscale.errors import SettingError


@contextmanager
def executor_for(name: str, jobs: int | None) -> Iterator[Any]:
    """Open the executor `pool`, with `jobs` processes, or the one that `package.module:callable` returns."""
    made = _pool(jobs or os.cpu_count() or 1) if name == "pool" else _made(name)
    with made if hasattr(made, "__exit__") else nullcontext(made) as executor:
        yield executor


def _made(name: str) -> Any:
    module, _, factory = name.partition(":")
    if not module or not factory:
        raise SettingError(
            f"Unknown executor {name!r}. Expected pool, or package.module:callable that returns an executor: any "
            "object with submit(), such as submitit.AutoExecutor(…) or distributed.Client(…)."
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        executor = getattr(importlib.import_module(module), factory)()
    except (ImportError, AttributeError, TypeError) as error:
        raise SettingError(f"Could not call {name} to get an executor: {error}") from error
    if not hasattr(executor, "submit"):
        raise SettingError(f"Expected {name} to return an object with submit(), got {type(executor).__name__}.")
    return executor


@contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    # Forking a process whose torch has started threads can hang; a server that has only imported it forks safely.
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(["attnscale.lab.sweep"])
    lifeline, parent_end = context.Pipe(duplex=False)
    executor = ProcessPoolExecutor(jobs, context, _start_worker, (lifeline,))
    try:
        yield executor
        executor.shutdown()
    finally:
        # after an exception: cancel pending tasks, or the executor's thread fails when its workers end
        executor.shutdown(wait=False, cancel_futures=True)
        parent_end.close()


def _start_worker(lifeline: Connection) -> None:
    """Leave Ctrl-C to the parent process, and end when it closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:
        lifeline.poll(None)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
