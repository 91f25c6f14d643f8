"""A log keeps its runs apart: two writers, a second run of the same name, a step that goes back, a resumed run."""

import json
from dataclasses import replace

import pytest
import torch

from attnscale import Monitor
from attnscale.models import CausalTransformer
from attnscale.train import JsonLines, read_log, room
from attnscale.train.line import line_of
from attnscale.train.survey import survey
from tests.cli.running import run as command
from tests.train.test_jsonlines import record


def steps(records):
    return [found.step for found in records]


def test_two_writers_of_one_file_keep_all_their_records_apart_also_when_it_is_thinned(tmp_path):
    path = tmp_path / "scores.jsonl"
    writers = [JsonLines(path), JsonLines(path)]
    for step in range(300):
        for number, writer in enumerate(writers):
            writer(replace(record(step, 1e3 if (step, number) == (37, 0) else number), run=None))
    log = read_log(path)
    assert len(log.records) == 600
    assert [steps(records) for records in log.runs.values()] == [list(range(300))] * 2
    room.rewrite_thinned(path)
    thinned = read_log(path)
    for name, records in thinned.runs.items():
        assert 150 < len(records) < 300
        covered = [step for found in records for step in range(found.step, found.last_step + 1)]
        assert covered == list(range(300))
        assert max(found.layers["layer"].whole("max") for found in records) == max(
            found.layers["layer"].whole("max") for found in log.runs[name]
        )


def test_a_second_run_of_the_same_file_begins_a_new_run_there(tmp_path):
    path = tmp_path / "scores.jsonl"
    for seed in range(2):
        torch.manual_seed(seed)
        model = CausalTransformer(vocabulary=17, d_model=32, layers=1, heads=2)
        monitor = Monitor(model, every=1, sinks=[path])
        for _ in range(3):
            model(torch.zeros(1, 5, dtype=torch.int64)).sum().backward()
            monitor.step()
        monitor.close()
    runs = read_log(path).runs
    assert [steps(records) for records in runs.values()] == [[0, 1, 2]] * 2
    assert None not in runs


def test_one_line_that_goes_back_hides_nothing(tmp_path):
    path = tmp_path / "scores.jsonl"
    sink = JsonLines(path)
    for step in (0, 10, 20, 0, 30, 40):
        sink(record(step))
    assert steps(read_log(path).records) == [0, 0, 10, 20, 30, 40]
    room.rewrite_thinned(path)
    assert steps(read_log(path).records) == [0, 0, 10, 20, 30, 40]


def test_a_log_without_names_is_read_and_a_step_that_goes_back_begins_another_run(tmp_path):
    path = tmp_path / "scores.jsonl"
    path.write_bytes(b"".join(line_of(record(step, run=None)) for step in (0, 10, 20, 0, 30, 40)))
    assert b'"run"' not in path.read_bytes()
    assert steps(read_log(path).records) == [0, 10, 20, 0, 30, 40]
    found = survey(path)
    assert [(entry.name, entry.first_step, entry.records) for entry in found.runs] == [(None, 0, 3), (None, 0, 3)]
    assert (found.chosen.number, found.run.last_step) == (2, 40)


def test_a_resumed_run_goes_on_under_its_name_and_replaces_what_it_repeats(tmp_path):
    path = tmp_path / "scores.jsonl"
    model = CausalTransformer(vocabulary=17, d_model=32, layers=1, heads=2)

    def train(monitor, steps):
        for _ in range(steps):
            model(torch.zeros(1, 5, dtype=torch.int64)).sum().backward()
            monitor.step()

    first = Monitor(model, every=1, sinks=[path])
    train(first, 3)
    kept = json.loads(json.dumps(first.state_dict()))
    train(first, 4)
    first.close()
    for more in (2, 3):  # resumed twice, from the same checkpoint
        again = Monitor(model, every=1, sinks=[path])
        again.load_state_dict(kept)
        train(again, more)
        again.close()
    runs = read_log(path).runs
    assert list(runs) == [first.run]
    assert steps(runs[first.run]) == [0, 1, 2, 3, 4, 5]
    assert len({found.part for found in runs[first.run]}) == 2


def test_watch_log_lists_the_runs_and_shows_the_one_that_is_asked_for(tmp_path):
    path = tmp_path / "scores.jsonl"
    for name, last in (("first", 5), ("second", 3)):
        sink = JsonLines(path)
        for step in range(last + 1):
            sink(record(step, run=name))
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


@pytest.mark.parametrize("wanted", [None, "1"])
def test_a_log_of_one_run_is_shown_as_before(tmp_path, wanted):
    path = tmp_path / "scores.jsonl"
    JsonLines(path)(record(0))
    found = survey(path, wanted)
    assert len(found.runs) == 1
    assert found.run.name == "one"
