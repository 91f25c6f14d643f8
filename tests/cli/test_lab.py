"""`attnscale lab`, by what it prints and what it writes."""

import json

import pytest

from attnscale.lab.experiments import EXPERIMENTS

from .running import run

NAMES = [
    "variance", "saturation", "divisors", "gradients", "initialisation", "length", "entropy-bound", "ablation", "kappa",
    "temperature", "trained",
]  # fmt: skip


def test_the_experiments_are_listed():
    assert [found["name"] for found in json.loads(run("lab", "--json").stdout)] == NAMES == list(EXPERIMENTS)


def test_a_run_prints_json_and_writes_numbers_a_page_and_cells_that_are_not_run_again(tmp_path):
    command = ("lab", "variance", "--quick", "--seeds", "2", "--jobs", "1", "--out", tmp_path, "--json")
    first = run(*command)
    assert first.returncode == 0, first.stderr
    found = json.loads(first.stdout)
    assert (found["experiment"], found["settings"]["seeds"]) == ("variance", 2)
    assert json.loads((tmp_path / "variance.json").read_text(encoding="utf-8")) == found
    assert found["conclusion"].split(".")[0] in (tmp_path / "variance.html").read_text(encoding="utf-8")
    assert len(list((tmp_path / "cells").glob("variance-*.json"))) == found["settings"]["cells"]
    assert json.loads(run(*command).stdout) == found  # read, not run: the seconds are the same too


def test_one_seed_gives_no_verdict(tmp_path):
    ran = run("lab", "variance", "--quick", "--seeds", "1", "--jobs", "1", "--out", tmp_path, "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["conclusion"].startswith("One seed has no interval")
    assert found["tables"]
    assert not [check for check in found["checks"] if check["holds"] and "interval" in check["evidence"]]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no-such"], "Unknown experiment 'no-such'. Expected one of: variance, "),
        (["variance", "--seeds", "0"], "Invalid value for '--seeds'"),
        (["variance", "--executor", "fleet"], "Unknown executor 'fleet'"),
        (["variance", "--device", "abacus"], "Expected a device that this machine has (cpu), got 'abacus'"),
        (["variance", "--out", __file__], "Could not write"),
    ],
)
def test_bad_input_is_refused_before_the_work(arguments, sentence, tmp_path):
    result = run("lab", "--out", tmp_path, *arguments)
    assert result.returncode == 2
    assert sentence in result.stderr
