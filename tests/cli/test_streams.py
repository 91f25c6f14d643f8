"""Streams that are closed or full, and results that cannot be kept: a sentence and a status, never a traceback."""

import os
import subprocess
import sys

import pytest

from attnscale.cli import CLOSED_PIPE
from tests.cli.running import run

BROKEN = "tests.checking.broken:unscaled"
FULL = "/dev/full"
UNWRITABLE = {f"> {FULL}": "No space left on device", ">&-": "Bad file descriptor"}
needs_full = pytest.mark.skipif(not os.path.exists(FULL), reason="there is no /dev/full here")
posix = pytest.mark.skipif(sys.platform == "win32", reason="a shell that closes streams")
ENVIRONMENT = os.environ | {"COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}


def shell(line):
    """Run a line of sh, in which $attnscale is the command."""
    own = ENVIRONMENT | {"attnscale": f"{sys.executable} -m attnscale"}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    return subprocess.run(["sh", "-c", line], env=own, capture_output=True, text=True, encoding="utf-8", check=False)


@needs_full
@posix
@pytest.mark.parametrize("command", ["predict", "rules --json", "--help"])
@pytest.mark.parametrize("target", UNWRITABLE)
def test_output_that_cannot_be_written_gives_one_sentence(command, target):
    result = shell(f"$attnscale {command} {target}")
    assert result.returncode == 2
    assert result.stderr == f"attnscale: Could not write the output: {UNWRITABLE[target]}.\n"


@posix
def test_a_closed_pipe_has_a_status_of_its_own():
    result = shell(f"{{ $attnscale check {BROKEN}; echo status $? >&2; }} | true")
    assert result.stderr == f"status {CLOSED_PIPE}\n"


def test_bench_refuses_a_folder_before_it_times_anything(tmp_path):
    result = run("bench", "--device", "cpu", "--quick", "--out", tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"attnscale: Expected a file to write, got the folder {tmp_path}.\n"


@needs_full
def test_bench_prints_its_timings_even_if_the_file_cannot_be_written(monkeypatch):
    monkeypatch.setattr("attnscale.bench.costs.ROUNDS", 2)
    result = run("bench", "--device", "cpu", "--quick", "--kind", "dense", "--out", FULL)
    assert result.returncode == 2
    assert "plain SDPA, flash" in result.stdout
    assert result.stderr.endswith(f"attnscale: Could not write {FULL}: No space left on device.\n")
