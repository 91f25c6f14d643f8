"""A wheel of this repository in an environment of its own, with no package but those asked for."""

import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def closure(*names):
    """Distributions that are installed here, and all that they need in turn, without extras."""
    found, waiting = {}, list(names)
    while waiting:
        name = waiting.pop().lower()
        if name in found:
            continue
        found[name] = distribution(name)
        needs = map(Requirement, found[name].requires or ())
        waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found.values()


def ranges():
    """What pyproject.toml asks for, in the core and in what `all` brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    brought = Requirement(*extras["all"]).extras
    return [
        Requirement(text) for part in (project["dependencies"], *(extras[name] for name in brought)) for text in part
    ]


def build_wheel(folder):
    """The wheel, made from a copy: building leaves folders behind."""
    source = folder / "source"
    tracked = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                             capture_output=True, check=True).stdout.decode().split("\0")  # fmt: skip
    for name in filter(None, tracked):
        if name.startswith("src/") or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(source))
    return next(folder.glob("*.whl"))


def pip(python, *arguments):
    command = [sys.executable, "-m", "pip", "--quiet", "--python", str(python), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def empty_environment(folder, *borrowed):
    """An environment with nothing but these distributions, which it has by links; its python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for own in borrowed:
        for top in {file.parts[0] for file in own.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(own.locate_file(top))
    return folder / "bin" / "python"


def clean_environment(folder, wheel, *packages):
    """An environment with the wheel and these packages, borrowed from the one that runs the tests; its python."""
    python = empty_environment(folder, *closure(*packages))
    pip(python, "install", "--no-deps", "--no-index", str(wheel))
    return python
