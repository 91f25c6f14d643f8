"""The workflow that GitHub runs is valid, and runs nothing but what a developer runs."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_tests_run_on_every_system_and_python_that_is_supported():
    assert WORKFLOW[True].keys() == {"push", "pull_request", "schedule"}  # YAML reads the word on as yes
    matrix = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos", "windows"}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert matrix["python"] == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)


def test_every_job_checks_out_sets_up_and_ends_with_a_target_of_make():
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, flags=re.MULTILINE))
    assert set(WORKFLOW["jobs"]["nightly"]["strategy"]["matrix"]["target"]) <= targets
    for name, job in WORKFLOW["jobs"].items():
        steps = job["steps"]
        assert [step["uses"].partition("@")[0] for step in steps if "uses" in step] == [
            "actions/checkout", "actions/setup-python",
        ]  # fmt: skip
        made = re.fullmatch(r"make (\S+|\$\{\{ matrix\.target \}\}) PYTHON=python", steps[-1]["run"])
        assert made[1] in {*targets, "${{ matrix.target }}"}, name
        assert set(re.findall(r"\$\{\{ matrix\.(\w+) \}\}", str(job))) == job["strategy"]["matrix"].keys()
