"""Run every code block of README and docs; `python -m tests.docs.blocks [PAGE …]` refreshes the outputs they show.

The blocks of a page run from top to bottom in an empty folder. A `python` block with a title is a file of that name;
any other is executed, and a `text` block after it is its output. In a `console` block each line `$ command` is run, and
the lines below it are its output. In an output, numbers may differ by 2%, and a line `…` stands for lines left out.
"""

import contextlib
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from unittest import mock

import yaml

from tests.cli.running import run

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
# Commands that are shown and not run here, and why.
NOT_RUN = {
    "make test": "is what runs this",
    "pip install 'attnscale[all]'": "tests install the wheel into an environment of their own",
}
PARSERS = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load, "text": str, "": str}
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
ENVIRONMENT = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", "PYTHONIOENCODING": "utf-8", "PATH": PATH}
FENCE = re.compile(
    r'^```(?P<language>\w*)(?:[^\n]*title="(?P<title>[^"]+)")?[^\n]*\n(?P<body>.*?)^```$', re.MULTILINE | re.DOTALL
)
NUMBER = re.compile(r"[-−+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")
TOLERANCE = 0.02  # relative: another processor rounds differently, and training amplifies that
ROUGH = "numbers differ from machine to machine"  # a title: any number will do


@dataclass(frozen=True)
class Output:
    """Output of a block or a command: as the page shows it (None if it shows none), and as it was printed."""

    source: str
    shown: str | None
    printed: str
    span: tuple[int, int] = (0, 0)  # of the shown output, in the page
    tolerance: float = TOLERANCE

    @property
    def agrees(self) -> bool:
        """True if the page shows what was printed, or shows nothing."""
        return self.shown is None or same(self.shown, self.printed, self.tolerance)


def run_page(page: Path, folder: Path) -> list[Output]:
    """Run a page from top to bottom in a folder; a block that fails raises, with the page and the line."""
    loaded = set(sys.modules)
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        try:
            return list(_run_blocks(page, folder))
        finally:  # forget the modules that the page wrote
            for name in set(sys.modules) - loaded:
                if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                    del sys.modules[name]


def _run_blocks(page: Path, folder: Path) -> Iterator[Output]:
    text = page.read_text(encoding="utf-8")
    found = list(FENCE.finditer(text))
    names: dict[str, object] = {}
    for block, following in zip_longest(found, found[1:]):
        language, title, body = block["language"], block["title"], block["body"]
        where = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, block.start()) + 1}"
        if language == "python" and title:
            (folder / title).write_text(body, encoding="utf-8")
        elif language == "python":
            names = {"__name__": "__main__"} if page.name == "README.md" else names
            with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(body, where, "exec", dont_inherit=True), names)
            if following is not None and following["language"] == "text":
                shown, span = following["body"], following.span("body")
                yield Output(where, shown, printed.getvalue(), span, _tolerance(following["title"]))
            else:
                yield Output(where, None, printed.getvalue())
        elif language == "console":
            yield from _run_console(block, where, folder)
        elif language in PARSERS:
            PARSERS[language](body)
        else:
            raise ValueError(f"{where}: a block of {language!r} is neither run nor parsed.")


def _tolerance(title: str | None) -> float:
    return math.inf if title == ROUGH else TOLERANCE


def _run_console(block: re.Match[str], where: str, folder: Path) -> Iterator[Output]:
    commands = list(re.finditer(r"^\$ (.+?)(?:\s{2,}#.*)?\n((?:(?!\$ ).*\n)*)", block["body"], flags=re.MULTILINE))
    if not commands:
        raise ValueError(f"{where}: no line of this console block begins with '$ '.")
    for match, following in zip_longest(commands, commands[1:]):
        command, shown = match[1], match[2]
        if command in NOT_RUN or command == "echo $?":
            continue
        status, printed = run_command(command, folder)
        expected = int(following[2]) if following is not None and following[1] == "echo $?" else 0
        if status != expected:
            raise AssertionError(f"{where}: '{command}' ended with {status}, not {expected}:\n{printed}")
        start, end = (block.start("body") + position for position in match.span(2))
        yield Output(f"{where}: {command}", shown or None, printed, (start, end), _tolerance(block["title"]))


def run_command(command: str, folder: Path) -> tuple[int, str]:
    """Run a command and return its status and what it prints; attnscale's own run in this process."""
    program, *arguments = shlex.split(command)
    if program == "attnscale":
        with contextlib.chdir(folder):
            finished = run(*arguments, joined=True, **ENVIRONMENT)
        return finished.returncode, finished.stdout
    is_example = any(argument.startswith("examples/") for argument in arguments)
    executable = sys.executable if program == "python" else str(Path(sys.executable).with_name(program))
    finished = subprocess.run(
        [executable, *arguments], cwd=ROOT if is_example else folder, env=os.environ | ENVIRONMENT,
        capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip
    return finished.returncode, finished.stdout + (finished.stderr if finished.returncode else "")


def same(shown: str, printed: str, tolerance: float = TOLERANCE) -> bool:
    """Return True if the words agree and the numbers are close; a line `…` stands for any lines."""
    shown, printed = (_without_boxes(text, tolerance) for text in (shown, printed))
    parts = re.split(r"^…$", shown, flags=re.MULTILINE)
    words = ("".join(rf"\s+{_pattern(word)}" for word in part.split()) for part in parts)
    found = re.fullmatch(r"(?:\s.*?)?".join(words) + r"\s*", f"\n{printed.strip()}\n", flags=re.DOTALL)
    return found is not None and all(
        _is_close(*pair, tolerance) for pair in zip(NUMBER.findall(shown), found.groups(), strict=True)
    )


def _without_boxes(text: str, tolerance: float) -> str:
    """Remove colours and the widths of rules; where numbers may differ, a forecast may be missing too."""
    plain = re.sub(r"[─━═]+", "─", re.sub(r"\x1b\[[0-9;]*m", "", text))
    return plain if tolerance < math.inf else re.sub(r"[\d,]+ at \d+|–(?=\s)", "0", plain)


def _pattern(word: str) -> str:
    return rf"({NUMBER.pattern})".join(map(re.escape, NUMBER.split(word)))


def _is_close(shown: str, printed: str, tolerance: float) -> bool:
    if tolerance == math.inf:
        return True
    left, right = (float(text.replace(",", "").replace("−", "-")) for text in (shown, printed))
    decimals = len(shown.partition("e")[0].partition(".")[2])
    return abs(left - right) <= max(tolerance * abs(left), 1.5 * 10.0**-decimals if decimals else 0.0)


def refresh(page: Path) -> bool:
    """Write what was printed into the page, wherever it shows a whole output; return True if the page changed."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = run_page(page, Path(folder))
    text = before = page.read_text(encoding="utf-8")
    for output in reversed(outputs):
        if output.shown is None or (output.agrees and output.shown.split() != output.printed.split()):
            continue
        if "…" in output.shown.splitlines():
            if not output.agrees:
                print(f"{output.source}: shows only a part of what is printed now; edit it by hand:\n{output.printed}")
            continue
        printed = "\n".join(line.rstrip() for line in output.printed.strip("\n").splitlines())
        text = text[: output.span[0]] + f"{printed}\n" + text[output.span[1] :]
    page.write_text(text, encoding="utf-8")
    return text != before


if __name__ == "__main__":
    for page in [Path(argument).resolve() for argument in sys.argv[1:]] or PAGES:
        print(f"{page.relative_to(ROOT)}: {'refreshed' if refresh(page) else 'unchanged'}")
