import os
import time
from concurrent.futures import Executor

import psutil
import pytest

from attnscale.errors import SettingError
from attnscale.lab.executors import JobExecutor, executor_for, tasks_for
from attnscale.lab.sweep import sweep
from tests.lab.sweeping import SMALL, findings, identities, processes, swept


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return findings(swept(tmp_path_factory.mktemp("whole"), seeds=2))


def test_the_default_is_one_process_a_core_or_as_many_as_asked_for(tmp_path, whole):
    with executor_for("pool", 2, tmp_path) as executor:
        assert isinstance(executor, Executor)
        assert executor._max_workers == 2
        assert executor.submit(os.getpid).result() != os.getpid()
        assert findings(swept(tmp_path, executor, seeds=2)) == whole


def test_a_pool_that_is_stopped_ends_its_own_workers_and_nothing_else(tmp_path):
    other = processes.Process(target=time.sleep, args=(60,))
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt), executor_for("pool", 1, tmp_path) as executor:  # noqa: PT012
            worker = executor.submit(os.getpid).result()
            executor.submit(time.sleep, 60)
            raise KeyboardInterrupt
        deadline = time.monotonic() + 20
        while psutil.pid_exists(worker) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not psutil.pid_exists(worker)
        assert other.is_alive()
    finally:
        other.kill()
        other.join()


def test_submitit_gives_the_same_numbers(tmp_path, whole):
    with executor_for("submitit:cluster=local", 2, tmp_path) as executor:
        assert findings(sweep(SMALL, tmp_path / "cells", executor, seeds=2, tasks=2)) == whole
    assert len(identities(tmp_path / "cells")) == 20
    assert list((tmp_path / "submitit").glob("*_result.pkl"))  # submitit ran it


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_dask_cluster_gives_the_same_numbers(tmp_path, whole):
    from distributed import LocalCluster

    with (
        LocalCluster(
            n_workers=2, threads_per_worker=2, dashboard_address=None, host="127.0.0.1", worker_dashboard_address=None
        ) as cluster,
        executor_for(f"dask:{cluster.scheduler_address}", None, tmp_path) as executor,
    ):
        assert findings(sweep(SMALL, tmp_path / "cells", executor, seeds=2)) == whole
    assert len(identities(tmp_path / "cells")) == 20


def test_a_queue_of_jobs_takes_more_than_one_cell_a_job():
    assert tasks_for("submitit", 3) == 12
    assert tasks_for("pool", 3) is None
    assert tasks_for("dask:somewhere", 3) is None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("slurm", "Unknown executor 'slurm'. Expected one of: pool, submitit, dask:ADDRESS."),
        ("pool:4", "takes nothing after a colon"),
        ("dask", "needs the address of its scheduler"),
        ("dask:tcp://127.0.0.1:9", "No Dask scheduler answered at tcp://127.0.0.1:9"),
        ("submitit:cpu", "Expected KEY=VALUE"),
        ("submitit:cluster=local,no_such=1", "does not take these parameters"),
        ("submitit:cluster=nowhere", "submitit has no cluster"),
    ],
)
def test_what_cannot_be_used_is_answered_with_a_sentence(tmp_path, name, sentence, monkeypatch):
    monkeypatch.setattr("attnscale.lab.executors.CONNECT", 0.3)
    with pytest.raises(SettingError, match=sentence), executor_for(name, 1, tmp_path):
        pass


class Job:
    """As submitit's: asked whether it is done."""

    running = 0
    most = 0

    def __init__(self, work):
        self.work, self.ends = work, time.monotonic() + 0.05
        type(self).running += 1
        type(self).most = max(self.most, self.running)

    def done(self):
        return time.monotonic() > self.ends

    def result(self):
        type(self).running -= 1
        return self.work()


def test_jobs_run_so_many_at_a_time_and_errors_come_through():
    def fail():
        raise ValueError("no")

    with JobExecutor(Job, 3) as executor:
        futures = [executor.submit(lambda number=number: number**2) for number in range(11)]
        failed = executor.submit(fail)
        assert [future.result(timeout=30) for future in futures] == [number**2 for number in range(11)]
        with pytest.raises(ValueError, match="no"):
            failed.result(timeout=30)
    assert Job.most == 3
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(fail)
