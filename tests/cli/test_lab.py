import json

import pytest
from typer.testing import CliRunner

from attnscale.cli import app
from attnscale.lab.experiments import EXPERIMENTS

NAMES = [
    "variance", "saturation", "divisors", "gradients", "initialisation", "length", "entropy-bound", "ablation", "kappa",
    "temperature", "trained",
]  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(app, ["lab", *arguments])


def test_the_experiments_are_listed():
    assert [found["name"] for found in json.loads(run("--json").stdout)] == NAMES == list(EXPERIMENTS)


def test_a_run_prints_json_and_leaves_numbers_page_and_cells(tmp_path):
    first = run("variance", "--quick", "--seeds", "2", "--jobs", "1", "--out", str(tmp_path), "--json")
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    assert found["experiment"] == "variance"
    assert found["settings"]["seeds"] == 2
    assert json.loads((tmp_path / "variance.json").read_text(encoding="utf-8")) == found
    assert found["conclusion"].split(".")[0] in (tmp_path / "variance.html").read_text(encoding="utf-8")
    assert len(list((tmp_path / "cells").glob("variance-*.json"))) == found["settings"]["cells"]
    again = run("variance", "--quick", "--seeds", "2", "--jobs", "1", "--out", str(tmp_path), "--json")
    assert json.loads(again.stdout) == found  # read, not run: the seconds are the same too


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such"], "Unknown experiment 'no-such'. Expected one of: variance, "),
        (["variance", "--seeds", "0"], "Invalid value for '--seeds'"),
        (["variance", "--executor", "fleet"], "Unknown executor 'fleet'"),
        (["variance", "--device", "abacus"], "Expected a device that this machine has (cpu), got 'abacus'"),
    ],
)
def test_bad_input_is_answered_with_a_sentence(arguments, said, tmp_path):
    result = run(*arguments, "--out", str(tmp_path))
    assert said in f"{result.exception} {result.output}"


def test_a_place_that_cannot_be_written_is_told_before_the_work(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "Could not write" in str(run("variance", "--out", str(tmp_path / "file")).exception)


@pytest.mark.parametrize("name", ["variance"])
def test_one_seed_is_shown_and_concludes_nothing(name, tmp_path):
    ran = run(name, "--quick", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path), "--json")
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["conclusion"].startswith("One seed has no interval")
    assert found["tables"]
    assert not [check for check in found["checks"] if check["holds"] and "interval" in check["evidence"]]
