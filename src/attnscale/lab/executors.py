"""Where cells run: a pool of processes, Slurm through submitit, or a Dask cluster; each is a concurrent.futures one."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from attnscale.errors import SettingError

T = TypeVar("T")
TASKS_A_JOB = 4  # a job that is lost takes a quarter of its share with it at most
CONNECT = 10  # seconds to wait for a scheduler
POLL = 0.2  # seconds between two looks at jobs


@contextmanager
def executor_for(name: str, jobs: int | None, folder: Path) -> Iterator[Executor]:
    """`pool`, `submitit`, `submitit:KEY=VALUE,…` or `dask:ADDRESS`, for `jobs` cells at a time."""
    kind, _, detail = name.partition(":")
    if kind not in EXECUTORS:
        raise SettingError(f"Unknown executor {name!r}. Expected one of: pool, submitit, dask:ADDRESS.")
    with EXECUTORS[kind](detail, jobs or os.cpu_count() or 1, folder) as executor:
        yield executor


@contextmanager
def _pool(detail: str, jobs: int, folder: Path) -> Iterator[Executor]:
    if detail:
        raise SettingError(f"The executor 'pool' takes nothing after a colon, got {detail!r}; use --jobs.")
    # Forking a process whose torch has started threads can hang; a server that has only imported it forks safely.
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(["attnscale.lab.running"])
    executor = ProcessPoolExecutor(jobs, context, _be_a_worker)
    try:
        yield executor
    except BaseException:
        own = list(
            (executor._processes or {}).values()
        )  # and no other children of this process; the shutdown forgets them
        executor.shutdown(wait=False, cancel_futures=True)
        for process in own:
            process.terminate()
        raise
    executor.shutdown()


def _be_a_worker() -> None:
    """Leave Ctrl-C to the parent, and end with it, however it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


@contextmanager
def _submitit(detail: str, jobs: int, folder: Path) -> Iterator[Executor]:
    try:
        import submitit
    except ImportError:
        raise SettingError("The executor 'submitit' needs the package: pip install 'attnscale[lab]'.") from None
    parameters = _parameters(detail)
    cluster = parameters.pop("cluster", None)
    try:
        executor = submitit.AutoExecutor(folder / "submitit", cluster=cluster)
    except ValueError as error:
        raise SettingError(f"submitit has no cluster {cluster!r}: {error}") from None
    try:
        executor.update_parameters(**{"timeout_min": 60, "cpus_per_task": 1, **parameters})
    except (NameError, TypeError, ValueError) as error:
        raise SettingError(f"submitit does not take these parameters: {error}") from None
    with JobExecutor(executor.submit, jobs) as queue:
        yield queue


def _parameters(detail: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, detail.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise SettingError(f"Expected KEY=VALUE after 'submitit:', as in slurm_partition=cpu, got {part!r}.")
        found[name] = int(value) if value.isdecimal() else value
    return found


class JobExecutor(Executor):
    """Jobs that are asked whether they are done, as futures that tell; so many at a time."""

    def __init__(self, start: Callable[..., Any], at_once: int) -> None:
        self._start, self._at_once = start, at_once
        self._waiting: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._running: list[tuple[Future[Any], Any]] = []
        self._changed = threading.Condition()
        self._ends = False
        self._thread = threading.Thread(target=self._tend, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Have a function run as a job."""
        future: Future[T] = Future()
        with self._changed:
            if self._ends:
                raise RuntimeError("cannot submit after shutdown")
            self._waiting.append((future, fn, args, kwargs))
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more jobs; end those that wait or run, if so wished."""
        with self._changed:
            self._ends = True
            if cancel_futures:
                for future, *_ in self._waiting:
                    future.cancel()
                self._waiting.clear()
                for _, job in self._running:
                    job.cancel()
            self._changed.notify()
        if wait and not cancel_futures:
            self._thread.join()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.shutdown(cancel_futures=kind is not None)

    def _tend(self) -> None:
        while True:
            with self._changed:
                self._running = [(future, job) for future, job in self._running if not _finished(future, job)]
                while self._waiting and len(self._running) < self._at_once:
                    future, fn, args, kwargs = self._waiting.pop(0)
                    if future.set_running_or_notify_cancel():
                        self._begin(future, fn, args, kwargs)
                if not self._running and not self._waiting:
                    if self._ends:
                        return
                    self._changed.wait()
            time.sleep(POLL)

    def _begin(self, future: "Future[Any]", fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        try:
            self._running.append((future, self._start(fn, *args, **kwargs)))
        except Exception as error:
            future.set_exception(error)


def _finished(future: "Future[Any]", job: Any) -> bool:
    if not job.done():
        return False
    try:
        future.set_result(job.result())
    except Exception as error:
        future.set_exception(error)
    return True


@contextmanager
def _dask(detail: str, jobs: int, folder: Path) -> Iterator[Executor]:
    if not detail:
        raise SettingError("The executor 'dask' needs the address of its scheduler, as in dask:tcp://10.0.0.1:8786.")
    try:
        from distributed import Client
    except ImportError:
        raise SettingError("The executor 'dask' needs the package: pip install distributed.") from None
    try:
        client = Client(detail, timeout=CONNECT)
    except (OSError, ValueError) as error:
        raise SettingError(f"No Dask scheduler answered at {detail}: {error}") from None
    with client:
        executor = client.get_executor(pure=False)
        try:
            yield executor
        except BaseException:
            executor.shutdown(wait=False)  # which cancels
            raise
        executor.shutdown()


def tasks_for(name: str, jobs: int | None) -> int | None:
    """How many tasks to make of a sweep: a job that waits in a queue and starts a Python wants more than one cell."""
    return TASKS_A_JOB * (jobs or os.cpu_count() or 1) if name.startswith("submitit") else None


EXECUTORS = {"pool": _pool, "submitit": _submitit, "dask": _dask}
