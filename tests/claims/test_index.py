"""Every exercise, listing and worked example has a command, and each command is one that there is."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnscale.claims import INDEX, SOURCES
from attnscale.cli import app
from attnscale.lab.experiments import EXPERIMENTS

ROOT = Path(__file__).parents[2]
EXERCISES = ("standard deviation", "softmax([x, 0, 0, 0])", "with and without", "temperatures", "peaked and uniform")


def test_every_source_is_in_the_index():
    assert {worked.source for worked in INDEX} == {source.name for source in SOURCES}


def test_the_five_exercises_and_both_listings_are_there():
    exercises = [worked.what for worked in INDEX if worked.kind == "exercise"]
    for number, words in enumerate(EXERCISES, 1):
        assert any(what.startswith(f"{number}. ") and words in what for what in exercises)
    listings = {worked.what for worked in INDEX if worked.kind == "listing"}
    assert listings == {"scaled_dot_product_attention", "stable_softmax"}


@pytest.mark.parametrize("worked", INDEX, ids=lambda worked: worked.command)
def test_a_command_of_the_index_is_one_that_there_is(worked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, command, *arguments = shlex.split(worked.command)
    if program == "jupyter":
        assert (ROOT / arguments[0]).exists()
        return
    assert program == "attnscale"
    assert command != "claims"  # a verdict is nothing to see
    if command == "lab":
        assert arguments[0] in EXPERIMENTS
    elif command == "demo":
        assert not arguments
    else:
        quiet = ["--no-open"] if command == "explore" else []
        run = CliRunner().invoke(app, [command, *arguments, *quiet])
        assert run.exit_code == 0, run.output


def test_the_index_is_shown_with_its_brackets():
    run = CliRunner().invoke(app, ["claims", "--index"])
    assert "softmax([x, 0, 0, 0])" in run.output
