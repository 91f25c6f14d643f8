"""Whatever a line of a log holds, it is read or it is counted and shown: no traceback, and no other line is lost."""

import json
import sys

import pytest

from attnscale.cli import main
from attnscale.train import read_log
from tests.train.corrupt import CORRUPT, ODD, line

SOUND = [line(step) for step in (0, 10, 20, 30, 40, 60, 70, 80)]


def log_with(path, odd):
    lines = [*SOUND[:5], odd, *SOUND[5:]]
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass") + b"\n")
    return path


@pytest.fixture
def watch_log(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["attnscale", "watch-log", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return ended.value.code, printed.out

    return run


@pytest.mark.parametrize("kind", CORRUPT)
def test_a_corrupt_line_is_counted_and_shown_and_no_other_is_lost(tmp_path, watch_log, kind):
    path = log_with(tmp_path / "scores.jsonl", CORRUPT[kind])
    log = read_log(path)
    assert ([record.step for record in log.records], log.damaged) == ([0, 10, 20, 30, 40, 60, 70, 80], 1)
    status, out = watch_log(path)
    assert status == 0
    assert "1 damaged line skipped" in out
    assert "scores.jsonl, line 6: " in out
    status, out = watch_log(path, "--json", "--html", tmp_path / "report.html")
    assert (status, json.loads(out)["damaged_lines"]) == (0, 1)
    assert json.loads(out)["damage"][0].startswith("scores.jsonl, line 6: ")


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("place", [5, 8])
def test_an_odd_line_is_read_and_shown_wherever_it_stands(tmp_path, watch_log, kind, place):
    path = tmp_path / "scores.jsonl"
    lines = [*SOUND[:place], ODD[kind], *SOUND[place:]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert read_log(path).damaged == 0
    assert len(read_log(path).records) == 9
    for options in ([], ["--json"], ["--html", tmp_path / "report.html"]):
        status, out = watch_log(path, *options)
        assert status == 0
        assert out.replace("\n", "").isprintable()
