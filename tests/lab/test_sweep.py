import json
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from attnscale.errors import DamagedFileWarning
from attnscale.lab import running
from attnscale.lab.cell import Cell
from attnscale.lab.running import SweepError, run_cell
from attnscale.lab.store import Store, Stored
from tests.lab.sweeping import SMALL, findings, identities, processes, swept
from tests.processes import started

CELL = Cell("variance", 1, {"case": "normal", "head_dim": 5, "seed": 3})


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    start = time.monotonic()
    result = findings(swept(tmp_path_factory.mktemp("whole")))
    return result, time.monotonic() - start


@pytest.fixture(scope="module")
def whole(timed):
    return timed[0]


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


def test_a_cell_draws_from_its_seed_and_leaves_nothing_behind():
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
        assert findings(swept(tmp_path, threads)) == whole


def test_what_is_done_is_never_run_again(tmp_path, whole, monkeypatch):
    swept(tmp_path, seeds=2)
    before, ran = identities(tmp_path), []
    monkeypatch.setattr(running, "run_cell", lambda cell: ran.append(cell) or run_cell(cell))
    assert findings(swept(tmp_path)) == whole
    assert {cell.settings["seed"] for cell in ran} == {2}
    assert before.items() <= identities(tmp_path).items()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"mean": ', '"mean": 1', 1),
        lambda text: text.replace('"head_dim": 1', '"head_dim": 2', 1),
        lambda text: "[1, 2]",
        lambda text: "null",
        lambda text: '{"experiment": "variance"}',
        lambda text: "\x00" * len(text),
    ],
)
def test_a_damaged_cell_is_set_aside_and_run_again_and_said(tmp_path, whole, damage):
    swept(tmp_path)
    path = Store(tmp_path).path(SMALL.cells(seeds=1)[0])
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.warns(DamagedFileWarning, match=f"{path.name} was damaged; it is set aside as {path.stem}.damaged"):
        assert findings(swept(tmp_path)) == whole
    assert path.with_suffix(".damaged").exists()
    assert findings(swept(tmp_path)) == whole  # and the new one is sound


def test_a_cell_of_another_version_is_not_taken(tmp_path):
    store = Store(tmp_path)
    store.write(CELL, Stored({"mean": 1.0}, 0.1))
    assert store.read(Cell("variance", 2, CELL.settings)) is None
    assert store.read(CELL) == Stored({"mean": 1.0}, 0.1)


def _sweep_until_killed(folder, begins):
    begins.set()
    swept(folder)


@pytest.mark.slow
def test_a_sweep_killed_at_twenty_moments_goes_on_where_it_was(tmp_path, timed):
    (whole, seconds), moments, before, counts = timed, random.Random(0), {}, set()
    longest = seconds / 4
    for _ in range(20):
        begins = processes.Event()
        process = processes.Process(target=_sweep_until_killed, args=(tmp_path, begins))
        process.start()
        begins.wait()
        process.join(moments.uniform(0.0, longest))
        process.kill()
        process.join()
        now = identities(tmp_path)
        assert before.items() <= now.items()  # nothing lost, nothing written again
        longest *= 1.5 if len(now) == len(before) else 1.0  # the machine is busier than when a sweep was timed
        before = now
        counts.add(len(now))
    assert len(counts) > 1  # it was killed here and there, not before it began or after it ended
    assert findings(swept(tmp_path)) == whole
    assert before.items() <= identities(tmp_path).items()
    assert len(identities(tmp_path)) == 30
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".damaged"]


def test_two_sweeps_of_one_folder_share_its_cells(tmp_path, whole, monkeypatch):
    ran, lock = [], threading.Lock()

    def slowly(cell):
        with lock:
            ran.append(cell.digest)
        time.sleep(0.01)
        return run_cell(cell)

    monkeypatch.setattr(running, "run_cell", slowly)
    with ThreadPoolExecutor(2) as both:
        found = [both.submit(swept, tmp_path) for _ in range(2)]
        assert [findings(future.result()) for future in found] == [whole, whole]
    assert len(ran) == len(set(ran)) == 30


def test_a_cell_that_fails_is_named_and_the_others_are_kept(tmp_path, whole, monkeypatch):
    def failing(cell):
        if cell.settings["head_dim"] == 64:
            raise ZeroDivisionError("no such thing")
        return run_cell(cell)

    monkeypatch.setattr(running, "run_cell", failing)
    with pytest.raises(SweepError, match=r"variance \(case=\w+, head_dim=64, seed=0\) failed: ZeroDivisionError: no"):
        swept(tmp_path)
    monkeypatch.undo()
    kept = identities(tmp_path)
    assert len(kept) >= 3
    assert findings(swept(tmp_path)) == whole
    assert kept.items() <= identities(tmp_path).items()


def test_a_command_killed_leaves_no_worker_and_goes_on(tmp_path):
    command = [sys.executable, "-m", "attnscale", "lab", "variance", "--quick", "--jobs", "2", "--json", "--out"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    cells = tmp_path / "killed" / "cells"
    with started([*command, str(tmp_path / "killed")], **quiet) as process:
        while len(list(cells.glob("*.json"))) < 5:
            assert process.poll() is None
            time.sleep(0.01)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        assert workers
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive
    before = identities(cells)
    runs = {}
    for name in ("killed", "whole"):
        done = subprocess.run([*command, str(tmp_path / name)], capture_output=True, text=True, check=True)
        runs[name] = json.loads(done.stdout)
        runs[name].pop("settings")
    assert runs["killed"] == runs["whole"]
    assert before.items() <= identities(cells).items()


@pytest.mark.skipif(os.name == "nt", reason="sends a Unix signal")
def test_ctrl_c_says_what_is_kept_and_ends_with_130(tmp_path):
    import signal

    command = [sys.executable, "-m", "attnscale", "lab", "variance", "--jobs", "2", "--out", str(tmp_path)]
    with started(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while len(list((tmp_path / "cells").glob("*.json"))) < 5:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "cells are kept in" in errors
    assert "Traceback" not in errors


def test_a_sweep_says_that_it_waits_and_for_whom(tmp_path, monkeypatch):
    monkeypatch.setattr("attnscale.lab.sweep.PATIENCE", 0.05)
    cell, told = SMALL.cells(seeds=1)[0], []
    with ThreadPoolExecutor(1) as one:
        with Store(tmp_path).turn(cell, "process 17 on elsewhere, 1a2b"):
            waiting = one.submit(swept, tmp_path, seeds=1, tell=told.append)
            deadline = time.monotonic() + 60
            while not told and time.monotonic() < deadline:
                time.sleep(0.01)
        waiting.result(timeout=60)
    assert told == ["Waiting for a cell that process 17 on elsewhere is running in the same folder."]
    assert not list(tmp_path.glob("*.holder"))
