"""The live table in a terminal, beside progress bars and other output of a training loop."""

import re
import sys

import pytest
import rich
from rich.console import Console
from rich.progress import Progress

from attnscale.diagnose import Finding
from attnscale.measure.statistics import logged
from attnscale.show.live_table import LiveTable
from attnscale.train import LayerRecord, Record

pytest.importorskip("termios")
from tests.terminal import PLAIN, Terminal

tqdm = pytest.importorskip("tqdm").tqdm
ALARM = Finding("blocks.0", 1, "exploding", "warning", "The largest score is 15.", 15.0, 10.0, "Clip.")


@pytest.fixture
def terminal(monkeypatch):
    """Return a terminal that replaces standard output and error inside `with`."""
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return Terminal()


@pytest.fixture
def table():
    """Return `table(step, *alarms)`, which draws a record as a monitor does."""
    sink = None

    def draw(step, *alarms):
        nonlocal sink
        sink = sink or LiveTable()
        numbers = {name: [0.25, 0.75] for name in logged()}
        layers = {f"blocks.{index}": LayerRecord(64, numbers) for index in range(2)}
        sink(Record(step, 0.0, layers, list(alarms), loss=2.5))

    draw.close = lambda: sink.close()
    return draw


def bar(steps, name, **more):
    return tqdm(range(steps), desc=name, mininterval=0, miniters=1, **more)


def shown(terminal):
    """Return how the lines begin, without the second line of headings; a bar as its name and percentage."""
    words = [re.sub(r"^(\w+): +(\d+)%.*", r"\1 \2", line) for line in terminal.lines() if line.strip()]
    starts = [re.sub(r"^(step \d+) · loss 2\.5$|^(layer|blocks\.\d) .*", r"\1\2", line) for line in words]
    return [line for line in starts if not line.startswith(" ")]


def drawn(step):
    return [f"step {step}", "layer", "blocks.0", "blocks.1"]


def test_above_tqdm_bars_a_table_with_its_alarms_is_printed_at_every_sampled_step(terminal, table):
    with terminal:
        for _ in bar(1, "outer"):
            for step in bar(4, "inner", leave=False):
                if step % 2 == 0:
                    table(step, *[ALARM] * (step == 2))
        lines = [*drawn(0), *drawn(2), "warning: blocks.0, head 1: The largest score is 15.", "outer 100"]
        assert shown(terminal) == lines
        table.close()
        print("the end")
        assert shown(terminal) == [*lines, "the end"]


def test_one_table_is_redrawn_below_printed_lines_until_bars_appear(terminal, table):
    with terminal:
        table(0)
        print("printed")
        table(1)
        assert shown(terminal) == ["printed", *drawn(1)]
        for step in bar(2, "steps"):
            table(2 + step)
        lines = shown(terminal)
        assert lines[lines.index("step 1") :][:4] == drawn(1)
        assert lines[lines.index("step 3") :][:4] == drawn(3)
        assert lines[-1] == "steps 100"
        table.close()
        assert sys.stderr is terminal.file


def test_above_rich_bars_a_table_is_printed_at_every_sampled_step(terminal, table, monkeypatch):
    with terminal:
        monkeypatch.setattr(rich, "_console", Console())
        with Progress("{task.description} {task.completed}", auto_refresh=False) as progress:
            task = progress.add_task("steps")
            for step in range(2):
                table(step)
                progress.update(task, advance=1, refresh=True)
            assert shown(terminal) == [*drawn(0), *drawn(1), "steps 2"]
        table.close()
        assert shown(terminal) == [*drawn(0), *drawn(1), "steps 2"]
