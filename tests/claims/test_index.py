"""Every exercise, listing and worked example has a command, and each command is one that there is."""

import shlex

import pytest
from typer.testing import CliRunner

from attnscale.claims import INDEX, SOURCES
from attnscale.claims.ledger import ENTRIES
from attnscale.cli import app
from attnscale.lab.experiments import EXPERIMENTS

CLAIMS = {entry.id for _, entries in ENTRIES for entry in entries}
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
    assert program == "attnscale"
    if command == "claims":
        assert set(arguments) <= CLAIMS
    elif command == "lab":
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
