"""README and CONTRIBUTING do what they say."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language, text):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


COMMANDS = [
    line.removeprefix("$ ").split("  #")[0].strip()
    for block in blocks("console", README)
    for line in block.splitlines()
    if line.startswith("$ attnscale")
]


@pytest.mark.parametrize("code", blocks("python", README))
def test_python_in_the_readme_runs_and_prints_what_it_says(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed
    assert "0.40:" not in code or printed.startswith("0.398")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_in_the_readme_succeed(command):
    arguments = shlex.split(command)[1:]
    result = subprocess.run(
        [sys.executable, "-m", "attnscale", *arguments], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_the_readme_names_commands_and_every_room():
    assert len(COMMANDS) >= 4
    rooms = {path.name for path in (ROOT / "src/attnscale").iterdir() if path.suffix == ".py" or path.is_dir()}
    tree = README.split("src/attnscale/\n")[1].split("```")[0]
    missing = {room for room in rooms if room.removesuffix("/") not in tree and not room.startswith("__")}
    assert not missing


def test_the_picture_shows_what_the_command_prints(tmp_path, capsys):
    runpy.run_path(str(ROOT / "docs/pictures/make.py"))["main"](tmp_path)
    capsys.readouterr()
    assert (tmp_path / "predict.svg").read_bytes() == (ROOT / "docs/pictures/predict.svg").read_bytes()


def test_the_readmes_costs_are_the_recorded_ones():
    assert runpy.run_path(str(ROOT / "benchmarks/table.py"))["table"]() in README
