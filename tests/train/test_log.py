"""A log survives what happens to it: killed writers, a full disk, several writers, resumed runs, damaged lines."""

import errno
import json
import math
import os
import random
import subprocess
import sys
import time
import warnings

import pytest

from attnscale import Monitor
from attnscale.errors import SettingError, SinkWarning
from attnscale.measure.statistics import logged
from attnscale.train import JsonLines, LayerRecord, Log, Record, log, read_log, run
from attnscale.train.record import LineError
from attnscale.train.run import survey
from tests.cli.running import run as command
from tests.ranks import processes

from .logs import ALARM, LAYER, line, record, write_forever, write_many
from .training import batch, loss_of, small_model


def steps(records):
    return [found.step for found in records]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "scores.jsonl"


def test_records_are_read_as_written_and_each_unmerged_rank_has_its_own_file(tmp_path):
    path = tmp_path / "new" / "scores.jsonl"
    sink = JsonLines(path)
    for step, rank in ((0, None), (50, 0), (50, 3)):
        sink(record(step, 3.25, rank=rank))
    log = read_log(path)
    assert (steps(log.records), log.damaged) == ([0, 50], 0)
    assert log.records[0].layers["layer"].numbers["max"] == [3.25, 0.5]
    assert math.isnan(log.records[0].layers["layer"].numbers["spread"][1])
    assert sorted(file.name for file in path.parent.iterdir()) == ["scores.jsonl", "scores.rank3.jsonl"]


@pytest.mark.parametrize("torn", [b'{"step":50,"la', b"x" * 200_000])
def test_a_last_line_without_end_is_skipped_and_hides_nothing_after_it(path, torn):
    JsonLines(path)(record(0))
    with path.open("ab") as file:
        file.write(torn)
    log = read_log(path)
    assert (steps(log.records), log.damaged) == ([0], 0)
    for step in (100, 150):
        JsonLines(path)(record(step))
    log = read_log(path)
    assert (steps(log.records), log.damaged) == ([0, 100, 150], 1)


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_writers_that_are_killed_lose_no_record_that_they_finished(path, kills):
    moments, first = random.Random(0), 0
    for _ in range(kills):
        listening, saying = processes().Pipe(duplex=False)
        writer = processes().Process(target=write_forever, args=(path, first, 20_000, saying))
        writer.start()
        saying.close()
        last = listening.recv()
        deadline = time.monotonic() + moments.uniform(0.0, 0.05)
        while time.monotonic() < deadline:
            last = listening.recv()
        writer.kill()
        writer.join()
        try:
            while True:
                last = listening.recv()
        except EOFError:
            listening.close()
        written = steps(read_log(path).records)
        assert set(written) >= set(range(last + 1))
        first = max(written) + 1


def test_several_processes_write_one_log_while_it_is_read(path):
    writers = [processes().Process(target=write_many, args=(path, name, 200, 20_000)) for name in "abc"]
    for writer in writers:
        writer.start()
    before = 0
    while any(writer.is_alive() for writer in writers):
        log = read_log(path) if path.exists() else Log([], 0)
        assert (log.damaged, len(log.records) >= before) == (0, True)
        before = len(log.records)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    log = read_log(path)
    assert {name: steps(records) for name, records in log.runs.items()} == {name: list(range(200)) for name in "abc"}
    assert max(file.stat().st_size for file in path.parent.iterdir()) < 22_000  # the limit, and a line a writer


def test_a_full_file_is_continued_by_others_that_are_read_in_order_also_when_the_oldest_are_deleted(path):
    for step in range(60):
        JsonLines(path, limit=1_000)(record(step))
    names = {file.name for file in path.parent.iterdir()}
    assert names == {"scores.jsonl", *(f"scores.{number}.jsonl" for number in range(1, len(names)))}
    assert len(names) > 10  # so that 10 comes after 9
    assert steps(read_log(path).records) == list(range(60))
    path.unlink()
    JsonLines(path, limit=1_000)(record(60))
    left = steps(read_log(path).records)
    assert left == list(range(left[0], 61))
    assert 0 < left[0] < 10
    assert not path.exists()


def test_a_full_disk_gives_one_warning_and_later_records_are_kept(path, monkeypatch):
    JsonLines(path)(record(0))
    free, plain = [path.stat().st_size + 100], os.write

    def write(handle, data):
        if not free[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = plain(handle, data[: free[0]])
        free[0] -= written
        return written

    sink = JsonLines(path)
    monkeypatch.setattr(os, "write", write)
    with pytest.warns(SinkWarning, match=r"No space left on device\. Training goes on") as told:
        list(map(sink, map(record, range(1, 5))))
    monkeypatch.undo()
    assert len(told) == 1
    assert steps(read_log(path).records) == [0, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sink(record(9))
    assert steps(read_log(path).records) == [0, 1, 9]


MEASURED = """
import resource, sys
from pathlib import Path
from attnscale.train.run import survey
from attnscale.show import report  # so that what is imported is not counted
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report.run_page("log", (found := survey(Path(sys.argv[1]))).curves(), found.run)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_a_report_takes_less_memory_than_a_tenth_of_what_is_in_the_log(path):
    """A run of GPT-2-small's shape, some 20 kB a record, 25 MB in all."""
    numbers = {name: [round(0.1 + 0.0137 * head, 4) for head in range(12)] for name in logged()}
    layers = {f"blocks.{layer}.attention": LayerRecord(64 * 12, numbers) for layer in range(12)}
    before, after = Record(987654321, 1e9, layers, run="large").to_line().split(b"987654321")
    steps = range(0, 50 * 25 * 2**20 // len(before + after), 50)
    path.write_bytes(b"".join(before + str(step).encode() + after for step in steps))
    done = subprocess.run([sys.executable, "-c", MEASURED, str(path)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 20  # MB; as Python's own objects these records take 140


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with a name")
def test_a_path_that_is_no_log_is_refused_in_one_sentence(path):
    os.mkfifo(path.with_name("pipe.jsonl"))
    for name in (path.with_name("pipe.jsonl"), type(path)("/dev/zero"), path.parent):
        with pytest.raises(SettingError, match="it is not a file"):
            survey(name)
    for name in (path, path / "below.jsonl"):
        with pytest.raises(SettingError, match="No such file"):
            read_log(name)


def test_a_line_that_is_too_long_is_damage(path, monkeypatch):
    monkeypatch.setattr(log, "LONGEST", 1000)
    JsonLines(path)(record(0))
    with path.open("ab") as file:
        file.write(b"x" * 999 + b"\n")
        file.write(b"x" * 2_500 + b"\n")
    JsonLines(path)(record(1))
    found = read_log(path)
    assert (steps(found.records), found.damaged) == ([0, 1], 4)


def test_a_resumed_run_goes_on_under_its_name_and_replaces_what_it_repeats(path):
    model, kept = small_model(), None
    for number in (3, 2, 3):  # resumed twice, from the same checkpoint
        monitor = Monitor(model, every=1, sinks=[path])
        if kept is not None:
            monitor.load_state_dict(kept)
        for _ in range(number):
            loss_of(model, batch()).backward()
            monitor.step()
        kept = kept or json.loads(json.dumps(monitor.state_dict()))
        monitor.close()
    found = survey(path)
    assert {name: steps(records) for name, records in read_log(path).runs.items()} == {found.run.name: list(range(6))}
    assert (found.run.records, steps(found.curves()), found.run.last_step) == (6, list(range(6)), 5)


def test_watch_log_lists_the_runs_and_shows_the_one_that_is_asked_for(path):
    for name, last in (("first", 5), ("second", 3)):
        write_many(path, name, last + 1, 10_000)
    newest = command("watch-log", str(path))
    assert "2 runs in this log; number 2 is shown" in newest.stdout
    assert "steps 0–3, 4 records" in newest.stdout
    for wanted in ("first", "1"):
        plain = json.loads(command("watch-log", str(path), "--run", wanted, "--json").stdout)
        assert (plain["run"], plain["number"], plain["last_step"]) == ("first", 1, 5)
        assert [(entry["name"], entry["records"]) for entry in plain["runs"]] == [("first", 6), ("second", 4)]
    refused = command("watch-log", str(path), "--run", "third")
    assert refused.returncode == 2
    assert "Unknown run 'third'. Expected the number or the name of one: 1 (first), 2 (second)." in refused.stderr


def test_curves_keep_the_ends_of_a_run_whole_and_every_record_with_an_alarm(path, monkeypatch):
    monkeypatch.setattr(run, "CURVE_POINTS", 5)
    alarms = Record.from_line(line(alarms=[ALARM]).encode()).alarms
    for step in range(23):
        JsonLines(path)(record(step, float(step), alarms=alarms if step == 8 else []))
    curves = survey(path).curves()
    assert steps(curves) == [0, 5, 8, 10, 15, 20, 22]
    assert [len(found.layers["layer"].numbers["max"]) for found in curves] == [2, 1, 1, 1, 1, 1, 2]
    assert [found.layers["layer"].whole("max") for found in curves] == [0.5, 5.0, 8.0, 10.0, 15.0, 20.0, 22.0]


def test_a_line_has_a_version_and_what_a_newer_one_adds_is_ignored():
    found = Record.from_line(line().encode())
    assert json.loads(found.to_line())["version"] == 2
    layers, alarms = {"a.0": LAYER | {"colour": "red"}}, [ALARM | {"since": 40}]
    newer = Record.from_line(line(version=3, weather="fine", layers=layers, alarms=alarms).encode())
    assert str(newer.layers) == str(found.layers)
    assert [alarm.to_dict() for alarm in newer.alarms] == [ALARM]


def test_a_number_of_a_record_is_the_mean_of_the_layers_that_have_it():
    layers = {name: LayerRecord(7, {"max": [value, 0.5]}) for name, value in (("a", 2.0), ("b", 4.0))}
    layers |= {"c": LayerRecord(7, {"max": [math.inf]}), "d": LayerRecord(7, {"spread": [1.0]})}
    assert Record(0, 0.0, layers).whole("max") == 3.0
    assert math.isnan(Record(0, 0.0, layers).whole("top1"))


def with_layer(**changed):
    return line(layers={"a.0": LAYER | changed})


def with_alarm(**changed):
    return line(alarms=[{name: value for name, value in (ALARM | changed).items() if value != "out"}])


CORRUPT = {
    "not JSON": "hello",
    "bytes of nothing": "\x00" * 200,
    "no fields": "{}",
    "deep lists": "[" * 100_000 + "]" * 100_000,
    "a version that is a text": line(version="two"),
    "a step of 1e400": line().replace('"step": 50', '"step": 1e400'),
    "a step that is NaN": line().replace('"step": 50', '"step": NaN'),
    "a step below zero": line(step=-1),
    "no step": line(step=None),
    "a time beyond every calendar": line(time=1e300),
    "a loss that is a text": line(loss="low"),
    "layers in a list": line(layers=[LAYER]),
    "numbers that are one": with_layer(max=3.0),
    "a number that is a text": with_layer(max=["3.0", 0.5]),
    "a number of 1e400": with_layer(max=[7.25, 0.5]).replace("7.25", "1e400"),
    "fewer heads than others": with_layer(max=[3.0]),
    "no heads": with_layer(max=[], entropy_ratio=[], spread=[]),
    "a soft-cap that is a list": with_layer(softcap=[50.0]),
    "alarms that are a number": line(alarms=7),
    "an unknown severity": with_alarm(severity="catastrophe"),
    "an alarm without a message": with_alarm(message="out"),
    "an alarm of a head that is a text": with_alarm(head="1"),
    "a run that is a number": line(run=7),
}
ODD = {  # which are sound all the same
    "no spread": line(layers={"a.0": {"rows": 7, "max": [3.0, 0.5]}}),
    "no numbers": line(layers={"a.0": {"rows": 7}}),
    "no layers seen": line(layers={}),
    "huge numbers": with_layer(max=[1e300, 1e300], entropy_ratio=[1e300, -1e300]),
    "an unknown code": with_alarm(code="\x1b[31mred"),
    "names that steer a terminal": line(layers={"a\x1b[31m\x9b\u202e.0": LAYER}),
    "half of a character": line(layers={"a\ud800.0": LAYER}),
    "the largest step": line(step=2**53),
}


def write_lines(path, lines):
    path.write_bytes("\n".join([*lines, ""]).encode("utf-8", "surrogatepass"))


def test_corrupt_lines_are_counted_and_the_first_are_shown_and_no_other_is_lost(path):
    for kind in CORRUPT.values():
        with pytest.raises(LineError, match=r"^(expected|not JSON|not UTF-8|not readable)"):
            Record.from_line(kind.encode("utf-8", "surrogatepass"))
    write_lines(path, [each for step, kind in enumerate(CORRUPT.values()) for each in (line(10 * step), kind)])
    log = read_log(path)
    assert (steps(log.records), log.damaged) == (list(range(0, 10 * len(CORRUPT), 10)), len(CORRUPT))
    shown = command("watch-log", str(path))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"{len(CORRUPT)} damaged lines skipped" in shown.stdout
    plain = json.loads(command("watch-log", str(path), "--json", "--html", str(path.with_suffix(".html"))).stdout)
    assert plain["damaged_lines"] == len(CORRUPT)
    assert [each.partition(": ")[0] for each in plain["damage"]] == [f"scores.jsonl, line {at}" for at in (2, 4, 6)]


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_line_is_read_and_shown_wherever_it_stands(path, kind):
    write_lines(path, [line(10 * step) for step in range(5)] + [ODD[kind]] + [line(90), line(100)])
    assert read_log(path).damaged == 0
    shown = command("watch-log", str(path), "--html", str(path.with_suffix(".html")))
    assert (shown.returncode, shown.stderr.count("\n")) == (0, 1)
    assert shown.stdout.replace("\n", "").isprintable()
