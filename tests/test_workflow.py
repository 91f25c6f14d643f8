"""The workflow that GitHub runs: valid, and nothing in it but what a developer runs."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
TARGETS = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


def commands(job):
    return [step["run"] for step in WORKFLOW["jobs"][job]["steps"] if "run" in step]


def test_it_runs_the_tests_on_every_system_and_python_that_is_supported():
    assert WORKFLOW[True].keys() == {"push", "pull_request"}  # YAML takes the word on for yes
    matrix = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos", "windows"}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert matrix["python"] == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)


@pytest.mark.parametrize("job", WORKFLOW["jobs"])
def test_every_job_checks_out_sets_up_and_runs_targets_of_make(job):
    steps = WORKFLOW["jobs"][job]["steps"]
    assert all(("uses" in step) != ("run" in step) for step in steps)
    assert [step["uses"].partition("@")[0] for step in steps if "uses" in step] == [
        "actions/checkout", "actions/setup-python",
    ]  # fmt: skip
    made = re.match(r"make (\w+) PYTHON=python$", commands(job)[-1])
    assert made[1] in TARGETS
    assert made[1] == job


def test_what_it_asks_of_a_matrix_is_in_it():
    job = WORKFLOW["jobs"]["test"]
    asked = re.findall(r"\$\{\{ matrix\.(\w+) \}\}", str(job))
    assert set(asked) == job["strategy"]["matrix"].keys()
