"""Sweeps: a cell gives the same numbers on any executor, is kept, and is never run again."""

import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch

from attnscale.errors import DamagedFileWarning, SettingError
from attnscale.lab import sweep as sweeping
from attnscale.lab.executors import executor_for
from attnscale.lab.experiment import Cell
from attnscale.lab.experiments import EXPERIMENTS
from attnscale.lab.sweep import SweepError, run_cell, sweep
from tests.processes import started

VARIANCE = EXPERIMENTS["variance"]
SMALL = replace(VARIANCE, grid=lambda quick: VARIANCE.grid(True)[:10])  # two cases at five sizes
CELL = Cell("variance", 1, {"case": "normal", "head_dim": 5, "seed": 3})

METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"  # Windows has only that
processes = multiprocessing.get_context(METHOD)
if METHOD == "forkserver":
    processes.set_forkserver_preload([__name__])


def swept(folder, executor=None, **settings):
    """Run the small grid of three seeds, and return what it found."""
    with nullcontext(executor) if executor else ThreadPoolExecutor(1) as own:
        found = sweep(SMALL, folder, own, **{"seeds": 3, **settings}).to_dict()
    del found["settings"]
    return found


def identities(folder):
    """Return the inode and time of every cell's file: running a cell again would change both."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.json")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return swept(tmp_path_factory.mktemp("whole"))


def test_a_cell_is_named_by_all_of_its_configuration():
    same = Cell("variance", 1, {"seed": 3, "head_dim": 5, "case": "normal"})
    others = [
        Cell("length", 1, CELL.settings),
        Cell("variance", 2, CELL.settings),
        Cell("variance", 1, {**CELL.settings, "seed": 4}),
        Cell("variance", 1, {**CELL.settings, "more": None}),
    ]
    assert same.digest == CELL.digest
    assert len({cell.digest for cell in [CELL, *others]}) == 5


def test_a_cell_draws_from_its_seed_and_changes_no_global_state():
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.rand(17)
    first = run_cell(CELL).outcome
    torch.set_rng_state(state)
    assert run_cell(CELL).outcome == first
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert run_cell(Cell("variance", 1, {**CELL.settings, "seed": 4})).outcome != first


def test_cells_in_threads_of_one_process_do_not_mix_their_draws(tmp_path, whole):
    with ThreadPoolExecutor(7) as threads:
        assert swept(tmp_path, threads) == whole


def test_a_finished_cell_is_never_run_again(tmp_path, whole, monkeypatch):
    swept(tmp_path, seeds=2)
    before, ran = identities(tmp_path), []
    monkeypatch.setattr(sweeping, "run_cell", lambda cell: ran.append(cell) or run_cell(cell))
    assert swept(tmp_path) == whole
    assert {cell.settings["seed"] for cell in ran} == {2}
    assert before.items() <= identities(tmp_path).items()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 100_000,
        lambda text: text.replace('"seed": ', '"seed": 1'),
        lambda text: json.dumps({**json.loads(text), "outcome": 3}),
    ],
    ids=["empty", "cut", "nested", "another cell", "no outcome"],
)
def test_a_damaged_cell_is_reported_and_run_again(tmp_path, whole, damage):
    swept(tmp_path, seeds=1)
    path = sorted(tmp_path.glob("*.json"))[0]
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.warns(DamagedFileWarning, match=f"{path.name} is damaged. Its cell is run again."):
        swept(tmp_path, seeds=1)
    assert swept(tmp_path) == whole  # without a warning


def test_a_cell_that_fails_is_named_and_the_others_are_kept(tmp_path, whole, monkeypatch):
    def failing(cell):
        if cell.settings["head_dim"] == 64:
            raise ZeroDivisionError("no such thing")
        return run_cell(cell)

    monkeypatch.setattr(sweeping, "run_cell", failing)
    with pytest.raises(SweepError, match=r"variance \(case=\w+, head_dim=64, seed=0\) failed: ZeroDivisionError: no"):
        swept(tmp_path)
    monkeypatch.undo()
    kept = identities(tmp_path)
    assert len(kept) >= 3
    assert swept(tmp_path) == whole
    assert kept.items() <= identities(tmp_path).items()


class Remote:
    """An executor of the least that a sweep needs, on a machine with a disk of its own."""

    def __init__(self, folder, error=None):
        self.folder, self.error, self.calls, self.cancelled = folder, error, 0, 0

    def submit(self, function, folder, cells):
        self.calls += 1
        found = None if self.error else function(self.folder, cells)
        return SimpleNamespace(done=lambda: True, result=lambda: self.result(found), cancel=self.cancel)

    def result(self, found):
        if self.error:
            raise self.error
        return found

    def cancel(self):
        self.cancelled += 1


def test_any_object_with_submit_runs_cells_and_their_results_are_kept_here(tmp_path, whole):
    remote = Remote(tmp_path / "there")
    assert swept(tmp_path / "here", remote, tasks=4) == whole
    assert remote.calls == 4
    assert len(identities(tmp_path / "here")) == 30


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (BrokenProcessPool(), "A worker process died: .* Finished cells are kept"),
        (ValueError("no"), "A task failed: V"),
    ],
)
def test_a_lost_task_is_one_sentence_and_the_others_are_cancelled(tmp_path, error, sentence):
    remote = Remote(tmp_path, error)
    with pytest.raises(SweepError, match=sentence):
        swept(tmp_path, remote, tasks=4)
    assert remote.cancelled == 4


# Executors


def test_a_pool_has_as_many_processes_as_asked_for_and_gives_the_same_numbers(tmp_path, whole):
    with executor_for("pool", 2) as executor:
        assert executor._max_workers == 2
        assert executor.submit(os.getpid).result() != os.getpid()
        assert swept(tmp_path, executor) == whole


FACTORIES = """
import submitit
from distributed import Client, LocalCluster


def slurm():
    executor = submitit.AutoExecutor("logs", cluster="local")
    executor.update_parameters(timeout_min=5)
    return executor


def dask():
    return Client(n_workers=2, threads_per_worker=2, dashboard_address=None, host="127.0.0.1")
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("kind", ["slurm", "dask"])
def test_submitit_and_dask_give_the_same_numbers(tmp_path, monkeypatch, whole, kind):
    (tmp_path / "cluster_of_this_test.py").write_text(FACTORIES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with executor_for(f"cluster_of_this_test:{kind}", 2) as executor:
        assert swept(tmp_path / "cells", executor, tasks=2) == whole
    sys.modules.pop("cluster_of_this_test")
    assert len(identities(tmp_path / "cells")) == 30
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


# Kills


def _sweep_until_killed(folder, begins):
    begins.set()
    swept(folder)


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_a_sweep_that_is_killed_at_random_moments_loses_no_finished_cell(tmp_path, whole, kills):
    moments, longest, before, counts = random.Random(0), 0.4 / kills, {}, set()
    for _ in range(kills):
        begins = processes.Event()
        process = processes.Process(target=_sweep_until_killed, args=(tmp_path, begins))
        process.start()
        begins.wait()
        process.join(moments.uniform(0.0, longest))
        process.kill()
        process.join()
        now = identities(tmp_path)
        assert before.items() <= now.items()
        longest *= 1.5 if len(now) == len(before) else 1.0  # the machine is busier than it was
        before = now
        counts.add(len(now))
    assert len(counts) > 1 or kills == 2  # some kills came in the middle
    assert swept(tmp_path) == whole
    assert before.items() <= identities(tmp_path).items()
    assert len(list(tmp_path.iterdir())) == 30  # and no parts of files


def test_a_pool_that_is_stopped_ends_its_own_workers_and_no_other_process(tmp_path):
    other = processes.Process(target=time.sleep, args=(60,))
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt), executor_for("pool", 1) as executor:  # noqa: PT012
            worker = psutil.Process(executor.submit(os.getpid).result())
            executor.submit(time.sleep, 60)
            raise KeyboardInterrupt
        worker.wait(timeout=20)
        assert other.is_alive()
    finally:
        other.kill()
        other.join()


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="sends a Unix signal")
@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGINT"])
def test_a_command_that_is_stopped_leaves_no_worker_and_continues(tmp_path, signal_name):
    import signal

    command = [sys.executable, "-m", "attnscale", "lab", "variance", "--quick", "--jobs", "2", "--json", "--out"]
    cells = tmp_path / "stopped" / "cells"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with started([*command, str(tmp_path / "stopped")], **quiet) as process:
        while len(list(cells.glob("*.json"))) < 5:
            assert process.poll() is None
            time.sleep(0.01)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(getattr(signal, signal_name))
        _, errors = process.communicate(timeout=30)
        assert workers
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive
    if signal_name == "SIGINT":
        assert process.returncode == 130
        assert "cells are saved in" in errors
        assert "Traceback" not in errors
    before = identities(cells)
    runs = {}
    for name in ("stopped", "whole"):
        done = subprocess.run([*command, str(tmp_path / name)], capture_output=True, text=True, check=True)
        runs[name] = json.loads(done.stdout)
        runs[name].pop("settings")
    assert runs["stopped"] == runs["whole"]
    assert before.items() <= identities(cells).items()
