"""PyTorch's own tests of attention, from Debian's source package; nothing of them is kept in this repository."""

import shutil
import subprocess
import tarfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

SUITE = "trixie"  # its source package is PyTorch 2.6
WANTED = ("test_transformers.py", "test_cpp_extensions_open_device_registration.py")  # the second is imported by it
IMPORTED = "expecttest"  # by torch's own test code; laid beside them, for a machine where it is not installed
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
SOURCES = f"deb-src [signed-by={KEYS}] http://deb.debian.org/debian {SUITE} main\n"


def fetched(folder: Path) -> Path:
    """The folder with the tests, fetched if it is not there; apt keeps its lists there too, not the system's."""
    tests = folder / "test"
    if not all((tests / name).exists() for name in WANTED):
        tests.mkdir(parents=True, exist_ok=True)
        _extract(_downloaded(folder), tests)
    if find_spec(IMPORTED) is not None and not (tests / IMPORTED).exists():
        shutil.copytree(Path(str(import_module(IMPORTED).__file__)).parent, tests / IMPORTED)
    return tests


def _downloaded(folder: Path) -> Path:
    lists, cache, sources = folder / "lists", folder / "cache", folder / "sources.list"
    for each in (lists / "partial", cache / "archives" / "partial"):
        each.mkdir(parents=True, exist_ok=True)
    sources.write_text(SOURCES, encoding="utf-8")
    settings = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": lists,
        "Dir::Cache": cache,
        "APT::Sandbox::User": "root",
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    for command in (["update"], ["source", "--download-only", "pytorch"]):
        subprocess.run(["apt-get", "-q", *options, *command], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("pytorch_*.orig.tar.*"))


def _extract(archive: Path, tests: Path) -> None:
    with tarfile.open(archive) as opened:
        for member in opened:
            path = PurePosixPath(member.name)
            if path.name in WANTED and path.parent.name == "test":
                found = opened.extractfile(member)
                assert found is not None
                (tests / path.name).write_bytes(found.read())
    archive.unlink()
