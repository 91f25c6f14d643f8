"""A log is read as a stream, at any size, also while it is thinned, and a thinning that is killed leaves no files."""

import os
import random
import subprocess
import sys
import threading
import time

import pytest

from attnscale.errors import SettingError
from attnscale.train import JsonLines, read_log, room
from attnscale.train.snapshot import beside
from attnscale.train.survey import survey
from tests.processes import started
from tests.train.large import large_log
from tests.train.test_jsonlines import record

MEASURED = """
import resource, sys
from pathlib import Path
from attnscale.train import room, survey
from attnscale.show import report  # so that what is imported is not counted
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.argv[2] == "thin": room.rewrite_thinned(Path(sys.argv[1]))
else: report.run_page("log", (found := survey.survey(Path(sys.argv[1]), curves=True)).course, found.run)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("doing", ["show", "thin"])
def test_a_log_takes_less_memory_than_a_tenth_of_what_is_in_it(tmp_path, doing):
    path = large_log(tmp_path / "scores.jsonl", 25 * 2**20)
    taken = subprocess.run(
        [sys.executable, "-c", MEASURED, str(path), doing], capture_output=True, text=True, check=True
    )
    assert float(taken.stdout) < 20  # MB; as Python's own objects these records take 140


def test_reading_while_a_log_is_thinned_never_fails_and_sees_every_step(tmp_path):
    path, ends, failed = tmp_path / "scores.jsonl", threading.Event(), []
    sink = JsonLines(path, limit=20_000)
    sink(record(0))
    written = [0]

    def read():
        while not ends.is_set():
            least = written[0]
            try:
                records = read_log(path).records
                covered = {step for found in records for step in range(found.step, found.last_step + 1)}
                if not covered.issuperset(range(least + 1)) or len(covered) != sum(
                    found.last_step - found.step + 1 for found in records
                ):
                    failed.append(f"{least} steps, saw {len(covered)}")
            except Exception as error:
                failed.append(repr(error))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for step in range(1, 600):
            sink(record(step))
            written[0] = step
    finally:
        ends.set()
        for reader in readers:
            reader.join()
    assert failed == []


KILLED = "import sys; from pathlib import Path; from attnscale.train import room; print('now', flush=True)\n" + (
    "room.thin_files(Path(sys.argv[1]))"
)


def kill_thinnings(folder, times, size):
    """Kill thinnings of one log at random moments; how many ended before."""
    path, moments, ended = large_log(folder / "scores.jsonl", size), random.Random(0), 0
    room.set_aside(path)
    whole = read_log(path).records
    for _ in range(times):
        with started([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(moments.uniform(0, 0.05 + size / 2e7))
        names = {file.name for file in folder.iterdir()}
        if beside(path, "older").name in names:
            ended += 1
            assert names == {"scores.older.jsonl"}
            records = read_log(path).records
            assert records[-1] == whole[-1]
            beside(path, "older").unlink()
            large_log(path, size)
            room.set_aside(path)
        else:
            assert names == {"scores.aside.jsonl"}  # and no part of it
            assert len(read_log(path).records) == len(whole)
    return ended


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs files without names")
def test_thinning_that_is_killed_leaves_no_files_behind(tmp_path):
    kill_thinnings(tmp_path, 5, 2**20)


def test_a_part_of_a_thinning_killed_as_it_ended_is_removed_by_the_next_writer(tmp_path):
    path = tmp_path / "scores.jsonl"
    room.part_of(path).write_bytes(b"half")
    JsonLines(path)(record(0))
    assert [file.name for file in tmp_path.iterdir()] == ["scores.jsonl"]


def test_of_two_that_thin_one_log_one_waits_for_its_turn_and_nothing_is_lost(tmp_path):
    path = tmp_path / "scores.jsonl"
    for step in range(20):
        JsonLines(path)(record(step))
    room.set_aside(path)
    with beside(path, "aside").open("rb") as held:
        room.fcntl.flock(held, room.fcntl.LOCK_EX)
        room.thin_files(path)
        assert not beside(path, "older").exists()
        JsonLines(path)(record(20))
        room.set_aside(path)  # which what is set aside already is not replaced by
        assert len(read_log(path).records) == 21
    room.thin_files(path)
    assert beside(path, "older").exists()
    assert read_log(path).records[-1].step == 20


def test_what_a_slow_writer_adds_to_a_log_that_is_set_aside_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "scores.jsonl"
    for step in range(20):
        JsonLines(path)(record(step))
    room.set_aside(path)
    line, late_steps = room.line_of, []

    def late(found):
        if not late_steps:
            late_steps.append(20)
            with beside(path, "aside").open("ab") as file:
                file.write(line(record(20)))
        return line(found)

    monkeypatch.setattr(room, "line_of", late)
    room.thin_files(path)
    assert [found.step for found in read_log(path).records][-2:] == [19, 20]


def test_a_log_killed_between_two_names_counts_nothing_twice(tmp_path):
    path = tmp_path / "scores.jsonl"
    for step in range(20):
        JsonLines(path)(record(step))
    os.link(path, beside(path, "aside"))
    assert len(read_log(path).records) == 20
    room.thin_files(path)
    records = read_log(path).records
    assert sum(found.last_step - found.step + 1 for found in records) == 20


def test_a_record_that_stays_as_it_is_keeps_its_line(tmp_path):
    path = tmp_path / "scores.jsonl"
    for step in range(20):
        JsonLines(path)(record(step))
    lines = path.read_bytes().replace(b'"rank', b' "rank').splitlines(keepends=True)
    path.write_bytes(b"".join(lines)[:-1])  # the last has no end
    room.rewrite_thinned(path)
    thinned = path.read_bytes().splitlines(keepends=True)[1:]
    assert (thinned[0], thinned[-5:-1]) == (lines[0], lines[-5:-1])
    assert [found.step for found in read_log(path).records][-5:] == [15, 16, 17, 18, 19]


def test_a_line_without_end_is_cut_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("attnscale.train.snapshot.LONGEST", 1000)
    path = tmp_path / "scores.jsonl"
    JsonLines(path)(record(0))
    with path.open("ab") as file:
        file.write(b"x" * 5000 + b"\n")
    JsonLines(path)(record(1))
    log = read_log(path)
    assert ([found.step for found in log.records], log.damaged) == ([0, 1], 1)
    room.rewrite_thinned(path)
    assert b"x" * 5000 + b"\n" in path.read_bytes()  # nobody asked to delete it


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with a name")
def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in (tmp_path / "pipe.jsonl", "/dev/zero", tmp_path):
        with pytest.raises(SettingError):
            survey(type(tmp_path)(name))
