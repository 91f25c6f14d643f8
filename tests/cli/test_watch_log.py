"""`attnscale watch-log`, by what it prints and how it exits."""

import json
import signal
import subprocess
import sys

import pytest

from attnscale.diagnose import Finding
from attnscale.train import JsonLines, Record, read_log
from tests.processes import started
from tests.show.reports import records

from .running import in_a_process, run


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "scores.jsonl"
    sink = JsonLines(path)
    for record in records():
        sink(record)
    return path


def test_watch_log_prints_growth_alarms_and_a_forecast(log):
    result = in_a_process("watch-log", str(log))
    assert result.returncode == 0, result.stderr
    table = result.stdout.split("note exploding")[0]
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines() if line.strip()}
    assert rows["0"] == ["5", "5", "×", "1", "(350)", "0.375", "38", "0.38", "–"]
    assert rows["1"] == ["5", "578", "×", "5.75", "(350)", "0.375", "38", "0.38", "1,000", "at", "1128"]
    assert "note exploding  blocks.1.attention, head 0 · step 750" in result.stdout
    assert (
        "1 alarm; forecast: blocks.1.attention is the first to pass 1,000, about step 1128 and not before 1088."
    ) in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_watch_log_prints_the_run_as_json(log):
    plain = json.loads(run("watch-log", str(log), "--json").stdout)
    assert (plain["first_step"], plain["last_step"], plain["records"], plain["worst"]) == (0, 950, 20, "note")
    assert plain["layers"][1]["crossing"]["step"] == pytest.approx(1128, abs=1)
    assert plain["raised"][0]["steps"] == [750]
    assert plain["layers"][0]["crossing"] is None
    assert plain["alarms"][0]["step"] == 750


def test_an_error_among_the_alarms_ends_with_status_one(log):
    alarm = Finding("blocks.1.attention", None, "non_finite", "error", "NaN.", None, None, "Stop.")
    layers = read_log(log).records[-1].layers
    JsonLines(log)(Record(1000, 0.0, layers, [alarm]))
    assert run("watch-log", str(log)).returncode == 1


@pytest.mark.parametrize(("content", "sentence"), [(None, "No such file"), ("{}\nhello\n", "found none in it")])
def test_a_file_that_is_no_log_ends_with_status_two_and_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "other.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    result = run("watch-log", str(path))
    assert result.returncode == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_watch_log_writes_a_report_that_agrees_with_the_terminal(log, tmp_path):
    path = tmp_path / "new" / "report.html"
    result = run("watch-log", str(log), "--html", str(path))
    assert result.returncode == 0, result.stderr
    page = path.read_text(encoding="utf-8")
    conclusion = " ".join(result.stdout.split())
    conclusion = conclusion[conclusion.index("1 alarm;") :]
    assert conclusion in page
    assert "<title>scores.jsonl · attnscale watch-log</title>" in page
    for sentence, options in {"Expected a file": [tmp_path], "Expected --follow without": [path, "--follow"]}.items():
        refused = run("watch-log", log, "--html", *options)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert sentence in refused.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to one child")
def test_a_log_that_is_followed_is_shown_again_when_it_grows_until_it_is_interrupted(log):
    command = [sys.executable, "-u", "-m", "attnscale", "watch-log", str(log), "--follow"]
    whole = log.read_text(encoding="utf-8")
    log.write_text("\n".join(whole.splitlines()[:10]) + "\n", encoding="utf-8")
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert any("steps 0–450, 10 records" in line for line in iter(process.stdout.readline, ""))
        log.write_text(whole, encoding="utf-8")
        assert any("steps 0–950, 20 records" in line for line in iter(process.stdout.readline, ""))
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.communicate(timeout=30)[1]
        assert process.returncode == 0
