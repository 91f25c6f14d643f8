"""A log survives what befalls it: a process that dies while writing, a disk that fills, a run that resumes."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings

import pytest

from attnscale.errors import SettingError, SinkWarning
from attnscale.train import JsonLines, LayerRecord, Record, read_log, room
from attnscale.train.room import thin_files
from attnscale.train.sinks import jsonlines as module
from attnscale.train.snapshot import beside
from attnscale.train.thinning import thin
from tests.processes import started


def record(step, largest=1.0, **more):
    numbers = {"max": [largest, 0.5], "entropy_ratio": [1 / (1 + largest), 0.9], "spread": [1.0, float("nan")]}
    numbers["total_spread"] = [2.0, float("nan")]
    return Record(step, 1e9 + step, {"layer": LayerRecord(7, numbers)}, **{"run": "one", **more})


def test_what_is_written_is_read(tmp_path):
    sink = JsonLines(tmp_path / "new" / "scores.jsonl")
    for step in (0, 50):
        sink(record(step, 3.25))
    log = read_log(tmp_path / "new" / "scores.jsonl")
    assert [found.step for found in log.records] == [0, 50]
    assert log.records[0].layers["layer"].numbers["max"] == [3.25, 0.5]
    assert log.damaged == 0


def test_a_torn_last_line_is_set_aside_and_nothing_after_it_is_lost(tmp_path):
    path = tmp_path / "scores.jsonl"
    JsonLines(path)(record(0))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step":50,"la')
    assert [found.step for found in read_log(path).records] == [0]
    JsonLines(path)(record(100))
    assert [found.step for found in read_log(path).records] == [0, 100]
    assert (tmp_path / "scores.jsonl.torn").read_bytes() == b'{"step":50,"la\n'


def test_a_file_of_one_torn_line_begins_anew(tmp_path):
    path = tmp_path / "scores.jsonl"
    path.write_bytes(b"x" * 200_000)
    JsonLines(path)(record(0))
    assert [found.step for found in read_log(path).records] == [0]
    assert (tmp_path / "scores.jsonl.torn").stat().st_size == 200_001


WRITER = """
import os, sys
from attnscale.train import JsonLines, LayerRecord, Record
from attnscale.train.sinks import jsonlines
def slowly(handle, line):
    for at in range(0, len(line), 64):
        os.write(handle, line[at : at + 64])
        if WRITTEN == 3 and at > len(line) // 2:
            print("now", flush=True)
            sys.stdin.read()
    return len(line)
jsonlines.write = slowly
sink = JsonLines(sys.argv[1])
for WRITTEN in range(5):
    sink(Record(WRITTEN, 0.0, {"layer": LayerRecord(1, {"max": [0.1] * 500})}))
"""


def test_a_process_killed_while_it_writes_a_line_loses_that_line_alone(tmp_path):
    path = tmp_path / "scores.jsonl"
    command = [sys.executable, "-c", WRITER, str(path)]
    with started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not path.read_bytes().endswith(b"\n")
    JsonLines(path)(record(3))
    assert [found.step for found in read_log(path).records] == [0, 1, 2, 3]


def test_a_full_disk_is_told_once_and_leaves_whole_lines(tmp_path, monkeypatch):
    path, room = tmp_path / "scores.jsonl", [400]

    def write(handle, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(handle, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(module, "write", write)
    sink = JsonLines(path)
    sink(record(0))
    with pytest.warns(SinkWarning, match="No space left on device. Training goes on"):
        list(map(sink, map(record, range(1, 5))))
    kept = [found.step for found in read_log(path).records]
    assert kept == list(range(len(kept)))
    assert path.read_bytes().endswith(b"\n")
    room[0] = 10_000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sink(record(9))
    assert read_log(path).records[-1].step == 9


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_device_that_is_full_is_told_once(tmp_path):
    path = tmp_path / "scores.jsonl"
    path.symlink_to("/dev/full")
    sink = JsonLines(path)
    with pytest.warns(SinkWarning, match="No space left on device") as told:
        list(map(sink, map(record, range(2))))
    assert len(told) == 1


def test_steps_that_a_resumed_run_repeats_are_taken_from_it(tmp_path):
    sink = JsonLines(tmp_path / "scores.jsonl")
    for step, largest in ((0, 1.0), (50, 2.0), (100, 3.0), (50, 20.0), (100, 30.0)):
        sink(record(step, largest, part="first" if largest < 10 else "resumed"))
    records = read_log(tmp_path / "scores.jsonl").records
    assert [(found.step, found.layers["layer"].whole("max")) for found in records] == [
        (0, 1.0),
        (50, 20.0),
        (100, 30.0),
    ]


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    path = tmp_path / "scores.jsonl"
    JsonLines(path)(record(0))
    path.write_bytes(path.read_bytes() + b'\xff\xfe\n[]\n{"step": 3}\n7\n')
    log = read_log(path)
    assert len(log.records) == 1
    assert log.damaged == 4


def test_every_rank_that_is_not_merged_has_a_file_of_its_own(tmp_path):
    sink = JsonLines(tmp_path / "scores.jsonl")
    for rank in (None, 0, 3):
        sink(record(1, rank=rank))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scores.jsonl", "scores.rank3.jsonl"]


def test_a_log_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(SettingError, match="No such file"):
        read_log(tmp_path / "nothing.jsonl")


def test_thinning_keeps_extremes_alarms_and_the_newest():
    records = [record(step, largest=float(step == 13) * 99 + step % 5) for step in range(40)]
    thinned = records
    for _ in range(4):
        thinned = thin(thinned)
    assert len(thinned) <= 0.4 * len(records)
    assert max((found.until or found.step) - found.step for found in thinned) < 16  # none stands for much more
    assert thinned[0] == records[0]
    assert thinned[-1] == records[-1]
    assert max(found.layers["layer"].whole("max") for found in thinned) == 102.0
    assert min(found.layers["layer"].numbers["entropy_ratio"][0] for found in thinned) == 1 / 103.0
    covered = [step for found in thinned for step in range(found.step, (found.until or found.step) + 1)]
    assert covered == list(range(40))


def test_a_log_stays_under_its_limit_and_keeps_its_largest_score(tmp_path):
    path = tmp_path / "scores.jsonl"
    sink = JsonLines(path, limit=5_000)
    for step in range(400):
        sink(record(step, largest=1e3 if step == 37 else 1.0))
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 5_000
    records = read_log(path).records
    assert max(found.layers["layer"].whole("max") for found in records) == 1e3
    assert records[0].step == 0
    assert records[-1].step == 399
    assert sorted(file.name for file in tmp_path.iterdir()) == ["scores.jsonl", "scores.older.jsonl"]
    assert all(
        json.loads(line) for file in tmp_path.iterdir() for line in file.read_text(encoding="utf-8").splitlines()
    )


def log_of(folder, count, wide=1):
    """A log set aside for thinning, with an older part and newer records."""
    path = folder / "scores.jsonl"
    for name, steps in (("older", range(20)), ("aside", range(20, count)), (None, range(count, count + 3))):
        sink = JsonLines(path if name is None else beside(path, name))
        for step in steps:
            sink(record(step, largest=1e3 if step == 37 else step % 5))
    return path


@pytest.mark.parametrize("moment", ["write", "fsync", "replace", "unlink"])
def test_a_thinning_that_is_killed_at_any_moment_loses_nothing_and_counts_nothing_twice(tmp_path, moment):
    path = log_of(tmp_path, 60)
    before = read_log(path).records
    killed = """
import os, pathlib, sys
from attnscale.train import room
moment, calls = sys.argv[2], []
def kill(*args, **kwargs):
    os.kill(os.getpid(), 9)
if moment == "write": room.line_of = lambda record: kill() if len(calls) > 5 else calls.append(1) or b"{}\\n"
if moment == "fsync": os.fsync = kill
if moment == "replace": pathlib.Path.replace = kill
if moment == "unlink": pathlib.Path.unlink = kill
room.thin_files(pathlib.Path(sys.argv[1]))
"""
    done = subprocess.run([sys.executable, "-c", killed, str(path), moment], check=False)
    assert done.returncode == -signal.SIGKILL
    for _ in range(2):
        after = read_log(path).records
        assert max(found.layers["layer"].whole("max") for found in after) == 1e3
        steps = [step for found in after for step in range(found.step, (found.until or found.step) + 1)]
        assert sorted(set(steps)) == list(range(63))
        assert [found.step for found in after][-3:] == [60, 61, 62]
        if moment != "unlink":
            assert after == before
        thin_files(path)  # and the next try succeeds
        before = read_log(path).records


def test_a_large_log_is_set_aside_at_once_and_thinned_by_another_process(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "AT_ONCE", 0)
    path = tmp_path / "scores.jsonl"
    sink = JsonLines(path, limit=20_000)
    for step in range(80):
        sink(record(step, largest=1e3 if step == 37 else 1.0))
    assert beside(path, "aside").exists()  # under way, and meanwhile
    assert [found.step for found in read_log(path).records] == list(range(80))
    deadline = time.monotonic() + 60
    while beside(path, "aside").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    records = read_log(path).records
    assert len(records) < 80
    assert max(found.layers["layer"].whole("max") for found in records) == 1e3
    sink(record(80))  # the process is waited for


def test_a_number_of_a_record_is_the_mean_of_the_layers_that_have_it():
    layers = {name: LayerRecord(7, {"max": [value, 0.5]}) for name, value in (("a", 2.0), ("b", 4.0))}
    layers |= {"c": LayerRecord(7, {"max": [math.inf]}), "d": LayerRecord(7, {"spread": [1.0]})}
    assert Record(0, 0.0, layers).whole("max") == 3.0
    assert math.isnan(Record(0, 0.0, layers).whole("top1"))


def test_the_spread_of_a_log_that_knew_one_spread_alone_is_the_total():
    line = record(3, 5.0).to_dict()
    for layer in line["layers"].values():
        del layer["total_spread"]
    for layer in Record.from_dict(line).layers.values():
        assert "spread" not in layer.numbers
        assert layer.numbers["total_spread"][0] == 1.0
        assert math.isnan(layer.whole("spread"))
