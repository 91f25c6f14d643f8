"""Run every code block of README and docs, and compare or refresh the outputs they show.

    python docs/tools/blocks.py           compare, and say what differs
    python docs/tools/blocks.py --write   refresh the outputs in place

A page is run from top to bottom in an empty folder. A `python` block is executed, in the names that the blocks before
it left (README's start afresh each); with a title it is written to a file of that name instead. A `text` block after
it is what it prints. A line `$ command` of a `console` block is run, the lines under it are what it prints, and it
succeeds unless `$ echo $?` says how it ends. A line `…` stands for lines left out. Numbers must be close, unless the
title of the output says that they differ from machine to machine, as they do after training. Everything else is parsed.
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

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
# Commands that are shown and not run here, and why. Tests keep this short.
NOT_RUN = {
    "make demo": "trains two models for half a minute; tests/lab trains smaller ones",
    "make test": "is what runs this",
    "pip install 'attnscale[all]'": "tests install the wheel into an environment of their own",
    "attnscale claims --record": "changes the repository",
}
PLAIN = {"", "text"}  # output, or a drawing
PARSERS = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}
ENVIRONMENT = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", "PYTHONIOENCODING": "utf-8"}
FENCE = re.compile(r"^```(?P<language>\w*)(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[-−+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
RELATIVE = 0.02  # another processor rounds otherwise, and training passes it on
LEFT_OUT = "…"
ROUGH = "numbers differ from machine to machine"


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins and ends in its page, and what is in it."""

    language: str
    title: str | None
    body: str
    start: int  # of the body, in the page's text
    line: int

    @property
    def tolerance(self) -> float:
        """How far, relatively, a number it shows may be from the one that is printed."""
        return math.inf if self.title == ROUGH else RELATIVE


@dataclass(frozen=True)
class Ran:
    """What was run, what the page says it prints, what it printed, and where on the page the words stand."""

    source: str
    shown: str | None  # None: the page shows no output
    printed: str
    span: tuple[int, int] | None
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether the page shows what was printed, numbers within the tolerance."""
        return self.shown is None or same(self.shown, self.printed, self.tolerance)


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page."""
    found = []
    for match in FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', match["info"])
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(match["language"], title and title[1], match["body"], match.start("body"), line))
    return found


def run_page(page: Path, folder: Path) -> list[Ran]:
    """Run a page from top to bottom in a folder; what fails raises, with the page and the line."""
    known = set(sys.modules)
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        try:
            return list(_run_blocks(page, folder))
        finally:
            for name in set(sys.modules) - known:
                if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                    del sys.modules[name]  # a file that the page wrote


def _run_blocks(page: Path, folder: Path) -> Iterator[Ran]:
    found = blocks(page.read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for block, after in zip_longest(found, found[1:]):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.language == "python" and block.title:
            (folder / block.title).write_text(block.body, encoding="utf-8")
        elif block.language == "python":
            fresh = page.name == "README.md"
            printed = _execute(block.body, where, {"__name__": "__main__"} if fresh else names, folder)
            is_output = after is not None and after.language == "text"
            if is_output:
                span = after.start, after.start + len(after.body)
                yield Ran(where, after.body, printed, span, after.tolerance)
            else:
                yield Ran(where, None, printed, None, 0.0)
        elif block.language == "console":
            yield from _run_console(block, where, folder)
        elif block.language in PARSERS:
            PARSERS[block.language](block.body)
        elif block.language not in PLAIN:
            raise ValueError(f"{where}: a block of {block.language!r} is neither run nor parsed.")


def same(shown: str, printed: str, tolerance: float = RELATIVE) -> bool:
    """Whether words agree and numbers are close; `…` on a line of its own matches any lines."""
    pieces = [piece.split() for piece in re.split(rf"^{LEFT_OUT}$", _plain(shown, tolerance), flags=re.MULTILINE)]
    words, position = _plain(printed, tolerance).split(), 0
    for index, piece in enumerate(pieces):
        starts = [position] if index == 0 else range(position, len(words) - len(piece) + 1)
        if index == len(pieces) - 1 and index > 0:
            starts = [len(words) - len(piece)]
        begins = next((start for start in starts if _match(piece, words[start : start + len(piece)], tolerance)), None)
        if begins is None or begins < position:
            return False
        position = begins + len(piece)
    return position == len(words)


def _plain(text: str, tolerance: float) -> str:
    """Without colours, and with rules and boxes of any width alike; where numbers may differ, so may a forecast."""
    plain = re.sub(r"[─━═]+", "─", re.sub(r"\x1b\[[0-9;]*m", "", text))
    return plain if tolerance < math.inf else re.sub(r"[\d,]+ at \d+|–(?=\s)", "0", plain)


def _match(shown: list[str], printed: list[str], tolerance: float) -> bool:
    pairs = zip(shown, printed, strict=False)
    return len(shown) == len(printed) and all(_same_word(*pair, tolerance) for pair in pairs)


def _same_word(shown: str, printed: str, tolerance: float) -> bool:
    if shown == printed:
        return True
    if NUMBER.sub("0", shown) != NUMBER.sub("0", printed):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(_close(*pair, tolerance) for pair in pairs)


def _close(shown: str, printed: str, tolerance: float) -> bool:
    if tolerance == math.inf:
        return True
    left, right = (float(text.replace(",", "").replace("−", "-")) for text in (shown, printed))
    decimals = len(shown.partition("e")[0].partition(".")[2])
    last_digit = 10.0**-decimals if decimals else 0.0
    return abs(left - right) <= max(tolerance * abs(left), 1.5 * last_digit)


def _execute(code: str, where: str, names: dict[str, object], folder: Path) -> str:
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, where, "exec", dont_inherit=True), names)
    return printed.getvalue()


def _run_console(block: Block, where: str, folder: Path) -> Iterator[Ran]:
    """One command after the other, each with the lines under it as its output."""
    commands = list(re.finditer(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", block.body, flags=re.MULTILINE))
    if not commands:
        raise ValueError(f"{where}: no line of this console block begins with '$ '.")
    following = [_command(match[1]) for match in commands[1:]]
    for match, then in zip_longest(commands, following):
        command, shown = _command(match[1]), match[2]
        if command in NOT_RUN or command == "echo $?":
            continue
        status, printed = run_command(command, folder)
        expected = int(commands[following.index(then) + 1][2]) if then == "echo $?" else 0
        if status != expected:
            raise AssertionError(f"{where}: '{command}' ended with {status}, not {expected}:\n{printed}")
        span = (block.start + match.start(2), block.start + match.end(2))
        yield Ran(f"{where}: {command}", shown or None, printed, span, block.tolerance)


def _command(line: str) -> str:
    """Without the comment behind it."""
    return re.sub(r"\s{2,}#.*", "", line).strip()


def run_command(command: str, folder: Path) -> tuple[int, str]:
    """Run a command and return its status and what it prints; attnscale's own without a new process."""
    program, *arguments = shlex.split(command)
    if program == "attnscale":
        return _run_attnscale(arguments, folder)
    is_example = any(argument.startswith("examples/") for argument in arguments)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    finished = subprocess.run(
        [sys.executable if program == "python" else str(Path(sys.executable).with_name(program)), *arguments],
        cwd=ROOT if is_example else folder,
        env=os.environ | ENVIRONMENT | {"PATH": path, "OMP_NUM_THREADS": "1"},  # threads that wait on a busy machine
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    failed = finished.returncode != 0
    return finished.returncode, finished.stdout + (finished.stderr if failed else "")


def _run_attnscale(arguments: list[str], folder: Path) -> tuple[int, str]:
    from attnscale.cli import main

    terminal = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(terminal),
        contextlib.redirect_stderr(terminal),
        mock.patch.object(sys, "argv", ["attnscale", *arguments]),
        mock.patch.dict(os.environ, ENVIRONMENT),
    ):
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
    terminal.seek(0)
    return status, terminal.read()


def refresh(page: Path) -> bool:
    """Write what was printed into the page, where it shows an output that is whole; whether anything changed."""
    with tempfile.TemporaryDirectory() as folder:
        runs = run_page(page, Path(folder))
    text = before = page.read_text(encoding="utf-8")
    for ran in reversed(runs):
        layout_only = ran.shown is not None and ran.shown.split() == ran.printed.split()
        if ran.span is None or ran.shown is None or (ran.agrees and not layout_only):
            continue
        if f"\n{LEFT_OUT}\n" in f"\n{ran.shown}":
            print(f"{ran.source}: differs, and shows only a part; mend it by hand:\n{ran.printed}")
            continue
        printed = "\n".join(line.rstrip() for line in ran.printed.strip("\n").splitlines())
        text = text[: ran.span[0]] + f"{printed}\n" + text[ran.span[1] :]
    page.write_text(text, encoding="utf-8")
    return text != before


def main() -> int:
    """Compare or refresh the pages that are named, or all."""
    named = [Path(argument).resolve() for argument in sys.argv[1:] if argument != "--write"]
    wrong = 0
    for page in named or PAGES:
        if "--write" in sys.argv:
            print(f"{page.relative_to(ROOT)}: {'refreshed' if refresh(page) else 'as it was'}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            for ran in run_page(page, Path(folder)):
                if not ran.agrees:
                    wrong += 1
                    print(f"{ran.source}: shown\n{ran.shown}\nprinted\n{ran.printed}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
