import os
import sys

import pytest

from attnscale.errors import SettingError
from attnscale.lab.executors import executor_for
from tests.lab.sweeps import findings, identities, swept


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return findings(swept(tmp_path_factory.mktemp("whole"), seeds=2))


def test_a_pool_has_as_many_processes_as_asked_for_and_gives_the_same_numbers(tmp_path, whole):
    with executor_for("pool", 2) as executor:
        assert executor._max_workers == 2
        assert executor.submit(os.getpid).result() != os.getpid()
        assert findings(swept(tmp_path, executor, seeds=2)) == whole


FACTORIES = """
import submitit
from distributed import Client, LocalCluster


def slurm():
    executor = submitit.AutoExecutor("logs", cluster="local")
    executor.update_parameters(timeout_min=5)
    return executor


def dask():
    return Client(n_workers=2, threads_per_worker=2, dashboard_address=None, host="127.0.0.1")


def nothing():
    return None
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "cluster_of_this_test.py").write_text(FACTORIES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "cluster_of_this_test"
    sys.modules.pop("cluster_of_this_test", None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("kind", ["slurm", "dask"])
def test_submitit_and_dask_give_the_same_numbers(tmp_path, factories, whole, kind):
    with executor_for(f"{factories}:{kind}", 2) as executor:
        assert findings(swept(tmp_path / "cells", executor, seeds=2, tasks=2)) == whole
    assert len(identities(tmp_path / "cells")) == 20
    assert kind == "dask" or list((tmp_path / "logs").glob("*_result.pkl"))  # submitit ran it


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("slurm", "Unknown executor 'slurm'. Expected pool, or package.module:callable that returns an executor"),
        ("no_such_module:executor", "Could not call no_such_module:executor to get an executor: No module named"),
        ("os:no_such_function", "Could not call os:no_such_function to get an executor: module 'os' has no"),
        ("os:getcwd", r"Expected os:getcwd to return an object with submit\(\), got str"),
    ],
)
def test_an_executor_that_cannot_be_used_is_one_sentence(name, sentence):
    with pytest.raises(SettingError, match=sentence), executor_for(name, 1):
        pass
