"""What is installed: the wheel in a clean environment, what it declares, and what other systems lack."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from email import message_from_bytes
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

import attnscale
from attnscale.extras import EXTRAS, extra_of, needing, require_extra
from tests.packaging import build_wheel, clean_environment

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOLDERS = ("src", "tests", "docs", "benchmarks", "scripts", "examples")
SCRIPTS = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]

WHEN_THERE = {"distributed", "lightning", "triton"}  # used where the user has them, and never required
ELSEWHERE = {"attnscale", "docs", "tests", "benchmarks", "scripts", "setup"}
OPENERS_OF_OTHER_THINGS = ("os", "webbrowser", "tarfile", "zipfile", "Image", "lzma", "gzip")
POSIX = {"fcntl", "grp", "pwd", "resource", "termios", "tty", "pty"}  # of the standard library, not on Windows

POSIX_NAMES = {f"os.{name}" for name in (
    "WNOHANG", "chown", "fork", "getegid", "geteuid", "getgid", "getloadavg", "getpgid", "getuid", "killpg", "mkfifo",
    "nice", "openpty", "posix_spawn", "pread", "pwrite", "register_at_fork", "sched_getaffinity", "setsid", "statvfs",
    "sysconf", "uname", "O_NONBLOCK", "O_TMPFILE",
)} | {f"signal.{name}" for name in (
    "SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGSTOP", "SIGUSR1", "SIGUSR2", "alarm",
    "setitimer",
)}  # fmt: skip


def declared(*extras):
    """The names of the distributions that pyproject.toml asks for, in the core or in these extras."""
    wanted = list(PROJECT["dependencies"])
    for extra in extras:
        wanted += PROJECT["optional-dependencies"][extra]
    return {Requirement(text).name.lower() for text in wanted}


def imports(path):
    """The top-level packages that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0]


def foreign(paths):
    """Those that are neither Python's, nor ours, nor a file beside the one that imports it."""
    found = {name for path in paths for name in imports(path) if not path.with_name(f"{name}.py").exists()}
    return found - set(sys.stdlib_module_names) - ELSEWHERE


def test_the_core_needs_torch_and_numpy_and_nothing_else():
    assert declared() == {"torch", "numpy"}


def test_extras_say_what_pyproject_says():
    for extra, packages in EXTRAS.items():
        assert declared(extra) - declared() == set(packages)
    assert PROJECT["optional-dependencies"]["all"] == [f"attnscale[{','.join(EXTRAS)}]"]


def test_every_import_of_the_package_is_declared():
    known = {package for packages in EXTRAS.values() for package in packages} | WHEN_THERE | declared()
    assert foreign((ROOT / "src").rglob("*.py")) - known == set()


def test_every_import_of_the_tests_and_tools_is_declared():
    owners = packages_distributions()
    known = declared(*PROJECT["optional-dependencies"])
    undeclared = {
        name for name in foreign(SCRIPTS) if not known & {owner.lower() for owner in owners.get(name, [name])}
    }
    assert undeclared == set()


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["dynamic"]
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert cited[1] == attnscale.__version__


def test_a_missing_package_is_named_with_the_extra_that_installs_it(monkeypatch):
    monkeypatch.setitem(EXTRAS, "report", ("no_such_package",))
    sentence = (
        r"A report needs the package no_such_package, which is not installed: pip install 'attnscale\[report\]'\."
    )
    with pytest.raises(attnscale.AttnscaleError, match=sentence):
        require_extra("report", "A report")
    with pytest.raises(attnscale.AttnscaleError, match=sentence), needing("A report"):
        import_module("no_such_package")
    with pytest.raises(ModuleNotFoundError), needing("A report"):
        import_module("of_nobody")
    assert extra_of(None) is None


USE = """
import torch, attnscale
q, k, v = (torch.randn(2, 3, 5, 7) for _ in range(3))
assert torch.allclose(attnscale.attention(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v))
assert attnscale.score_stats(q, k).std.shape == (3,)
layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
x = torch.randn(2, 5, 8)
print(attnscale.audit(layer, x, x, x))
from attnscale.models import CausalTransformer, load_bundled
monitor = attnscale.Monitor(CausalTransformer(vocabulary=16, d_model=8, layers=1, heads=2), sinks=["scores.jsonl"])
monitor.close()
for ask in (load_bundled, lambda: attnscale.Monitor(layer, sinks=["table"])):
    try:
        ask()
    except attnscale.AttnscaleError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def run(python, folder, *arguments):
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [str(python), *arguments], cwd=folder, env=own, capture_output=True, text=True, encoding="utf-8", check=False
    )


@pytest.fixture(scope="module")
def metadata(wheel):
    with ZipFile(wheel) as files:
        return message_from_bytes(files.read(next(name for name in files.namelist() if name.endswith("METADATA"))))


def test_the_wheel_says_where_it_comes_from(metadata):
    urls = dict(entry.split(", ") for entry in metadata.get_all("Project-URL"))
    assert urls.keys() == {"Repository", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(urls["Repository"]) for url in urls.values())


def test_pictures_and_links_of_the_readme_show_on_the_package_index(metadata):
    """There a path leads nowhere: every one stands behind the address of the repository."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = metadata.get_payload(decode=True).decode("utf-8")
    assert metadata["Description-Content-Type"] == "text/markdown"
    paths, addresses = (re.findall(r"(!?)\[[^\]]*\]\((\S+)\)", text) for text in (readme, shown))
    assert any(picture for picture, _ in paths)
    repository = PROJECT["urls"]["Repository"]
    for (picture, path), (_, address) in zip(paths, addresses, strict=True):
        assert (ROOT / path).exists()
        assert address == f"{repository}/{'raw' if picture else 'blob'}/HEAD/{path}"
    assert re.sub(rf"{re.escape(repository)}/(raw|blob)/HEAD/", "", shown).strip() == readme.strip()


@pytest.mark.skipif(sys.platform == "win32", reason="borrows packages by links")
def test_the_wheel_works_with_torch_and_numpy_alone(wheel, tmp_path):
    python = clean_environment(tmp_path / "core", wheel, "torch", "numpy")
    used = run(python, tmp_path, "-W", "error", "-c", USE)
    assert used.returncode == 0, used.stderr
    assert "The bundled model needs the package safetensors" in used.stdout
    assert "This sink needs the package rich, which is not installed: pip install 'attnscale[cli]'." in used.stdout
    asked = run(python.with_name("attnscale"), tmp_path, "check")
    assert asked.returncode == 2
    assert asked.stderr.strip().splitlines()[-1] == (
        "attnscale: The command line needs the package typer, which is not installed: pip install 'attnscale[cli]'."
    )
    assert "Traceback" not in asked.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="borrows packages by links")
def test_the_wheel_with_the_command_line_checks_and_names_the_extras_of_the_rest(wheel, tmp_path):
    python = clean_environment(tmp_path / "cli", wheel, "torch", "numpy", "typer", "rich", "safetensors")
    command = python.with_name("attnscale")
    checked = run(command, tmp_path, "check", "--html", "report.html")  # torch itself brings what [report] asks for
    assert checked.returncode == 0, checked.stderr
    assert "blocks" in checked.stdout
    assert "function drawHeat" in (tmp_path / "report.html").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    for arguments, extra in ((["check", "config.json"], "hf"),):
        refused = run(command, tmp_path, *arguments)
        assert refused.returncode == 2, refused.stderr
        assert f"pip install 'attnscale[{extra}]'." in refused.stderr
        assert "Traceback" not in refused.stderr


def opens_text_as_the_system_would(call):
    """Whether a call opens a file as text and leaves its encoding to the system."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if any(keyword.arg == "encoding" for keyword in call.keywords):
        return False
    if name == "open" and owner not in OPENERS_OF_OTHER_THINGS:
        words = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        return not any(re.fullmatch(r"[rwax+]*b[rwax+]*", word) for word in words)
    return bool(owner) and (name, len(call.args)) in (("read_text", 0), ("write_text", 1))


def test_text_is_opened_with_its_encoding():
    """Windows would take its own."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in SCRIPTS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and opens_text_as_the_system_would(node)
    ]
    assert found == []


def run_on_import(body):
    """The nodes that run when a module is imported, outside of functions and of what is tried or asked for first."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
                yield from ast.walk(part)
        elif isinstance(node, ast.ClassDef):
            yield from run_on_import([*node.decorator_list, *node.body])
        elif isinstance(node, ast.If):
            yield from ast.walk(node.test)
        elif not isinstance(node, ast.Try):
            yield from ast.walk(node)


def is_lacking_on_windows(node):
    if isinstance(node, ast.Import):
        return bool({alias.name for alias in node.names} & POSIX)
    if isinstance(node, ast.ImportFrom):
        return node.module in POSIX or any(f"{node.module}.{alias.name}" in POSIX_NAMES for alias in node.names)
    if isinstance(node, ast.Call):
        return ast.unparse(node).endswith(("get_context('fork')", "get_context('forkserver')"))
    return isinstance(node, ast.Attribute) and ast.unparse(node) in POSIX_NAMES


def test_what_windows_lacks_is_not_imported_unguarded():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in SCRIPTS
        for node in run_on_import(ast.parse(path.read_text(encoding="utf-8")).body)
        if is_lacking_on_windows(node)
    ]
    assert found == []


def test_names_that_windows_has_no_byte_for_are_in_no_path():
    tracked = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    names = [path.relative_to(ROOT).as_posix() for path in tracked]
    assert [name for name in names if re.search(r'[<>:"|?*\\]', name)] == []
    assert len({name.lower() for name in names}) == len(names)
