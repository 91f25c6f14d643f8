"""The wheel with everything, in clean environments with the lowest and with the newest versions that it allows.

torch alone is borrowed, at the version of the environment that runs the tests: its builds take gigabytes. Run with the
lowest torch (make lowest makes such an environment) it is the lowest of everything.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import distribution

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.packaging import build_wheel, empty_environment, pip, ranges

pytestmark = [
    pytest.mark.ranges,
    pytest.mark.skipif(sys.platform == "win32", reason="borrows torch by links"),
]

BERT = dict(model_type="bert", hidden_size=44, num_hidden_layers=2, num_attention_heads=4, vocab_size=97)
COMMANDS = (
    "--version",
    "predict",
    "rules",
    "check config.json --html check.html",
    "check --save saved.json",
    "compare saved.json bundled --html compare.html",
    "claims exp-50",
    "explore --no-open --out explore.html",
    "lab divisors --quick --out lab",
    "bench --device cpu --quick",
    "demo --steps 4 --head-dim 16 --html demo.html",
)
RECORD = """
import attnscale, torch
from attnscale.models import CausalTransformer
model = CausalTransformer(vocabulary=16, d_model=8, layers=1, heads=2)
monitor = attnscale.Monitor(model, every=1, sinks=["scores.jsonl"])
for _ in range(3):
    model(torch.randint(0, 16, (2, 7))).sum().backward()
    monitor.step()
monitor.close()
"""


def lowest(asked):
    """The constraint that holds a requirement to the lowest release of its range; None where it has no such."""
    bounds = [each.version for each in asked.specifier if each.operator == ">="]
    return f"{asked.name}=={bounds[0]}" if bounds else None


@pytest.fixture(scope="module", params=["lowest", "newest"])
def environment(request, tmp_path_factory):
    """The folder of an environment in which the wheel was installed with all extras."""
    folder = tmp_path_factory.mktemp(request.param)
    constraints = folder / "constraints.txt"
    held = [lowest(each) for each in ranges() if each.name != "torch"] if request.param == "lowest" else []
    constraints.write_text("\n".join(filter(None, held)), encoding="utf-8")
    python = empty_environment(folder / "environment", distribution("torch"))
    pip(python, "install", "--no-compile", "-c", str(constraints), f"{build_wheel(folder)}[all]")
    return folder, request.param


def run(folder, *arguments):
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(folder / "environment" / "bin" / arguments[0]), *arguments[1:]]
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, encoding="utf-8", check=False)


def test_the_installed_versions_are_the_requested_ones(environment):
    folder, which = environment
    names = [each.name for each in ranges()]
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    installed = json.loads(run(folder, "python", "-c", code).stdout)
    print(which, installed)
    for asked in ranges():
        assert asked.specifier.contains(installed[asked.name])
        if which == "lowest" and lowest(asked) and asked.name != "torch":
            assert Requirement(lowest(asked)).specifier.contains(Version(installed[asked.name]))


def test_every_command_works(environment):
    folder, _ = environment
    (folder / "config.json").write_text(json.dumps(BERT), encoding="utf-8")
    for command in COMMANDS:
        ended = run(folder, "attnscale", *command.split())
        assert ended.returncode == 0, f"{command}: {ended.stderr}"
    refused = run(folder, "attnscale", "predict", "--heads", "many")
    assert refused.returncode == 2
    assert refused.stderr.startswith("attnscale: Invalid value for '--heads': ")
    assert len(refused.stderr.splitlines()) == 1


def test_a_recorded_run_is_shown(environment):
    folder, _ = environment
    recorded = run(folder, "python", "-W", "error", "-c", RECORD)
    assert recorded.returncode == 0, recorded.stderr
    shown = run(folder, "attnscale", "watch-log", "scores.jsonl", "--html", "run.html")
    assert shown.returncode == 0, shown.stderr
