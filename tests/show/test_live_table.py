"""The live table on a terminal, beside tqdm's bars and whatever else a training loop writes there."""

import logging
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
from attnscale.train.delivery import LOGGER, Delivery

pytest.importorskip("termios")
from tests.terminal import PLAIN, Terminal

tqdm = pytest.importorskip("tqdm").tqdm
ALARM = Finding("blocks.0", 1, "exploding", "warning", "The largest score is 15.", 15.0, 10.0, "Clip.")
TABLE = ["layer", "blocks.0", "blocks.1"]  # how its lines begin, below the title


@pytest.fixture
def terminal(monkeypatch):
    """Where standard output and error go inside `with`: pytest has them for itself before."""
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return Terminal()


@pytest.fixture
def table():
    """A table as a monitor feeds it; `table(step)` hands it a record."""
    sink = None

    def draw(step, *alarms):
        nonlocal sink
        sink = sink or LiveTable()
        numbers = {name: [0.25, 0.75] for name in logged()}
        layers = {f"blocks.{index}": LayerRecord(64, numbers) for index in range(2)}
        record = Record(step, 0.0, layers, list(alarms), loss=2.5)
        delivery = Delivery([sink], None, print)
        delivery.write(record)
        delivery.alarm(record, is_logged=True)

    draw.close = lambda: sink.close()
    return draw


def bar(steps, name, **more):
    return tqdm(range(steps), desc=name, mininterval=0, miniters=1, **more)


def begins(lines):
    """The first words of lines that are not blank; a bar by its name and how far it is."""
    words = [re.sub(r"^(\w+): +(\d+)%.*", r"\1 \2", line) for line in lines if line.strip()]
    return [re.sub(r"^(step \d+) · loss 2\.5$|^(layer|blocks\.\d) .*", r"\1\2", line) for line in words]


def standing(step):
    """How the lines of a table begin; the second line of its headings begins with blanks."""
    return [f"step {step}", *TABLE]


def shown(terminal):
    return [line for line in begins(terminal.lines()) if not line.startswith(" ")]


def test_it_stands_below_a_bar_and_both_keep_their_lines(terminal, table):
    with terminal:
        for epoch in ("first", "second"):
            for step in bar(4, epoch):
                if step % 2 == 0:
                    table(step)
                if step == 2:
                    before = ["first 100"] if epoch == "second" else []
                    assert shown(terminal) == [*before, f"{epoch} 50", *standing(2)]
        assert shown(terminal) == ["first 100", "second 100", *standing(2)]
        table.close()
        print("the end")
        assert shown(terminal) == ["first 100", "second 100", *standing(2), "the end"]


def test_a_bar_inside_a_bar_has_its_line_too(terminal, table):
    with terminal:
        for _ in bar(2, "outer"):
            for step in bar(4, "inner", leave=False):
                table(step)
                if step == 3:
                    assert shown(terminal)[1:] == ["inner 75", *standing(3)]
        table.close()
        assert shown(terminal) == ["outer 100", *standing(3)]


def test_what_tqdm_writes_and_alarms_stand_above_both(terminal, table):
    with terminal:
        told = logging.StreamHandler()
        LOGGER.addHandler(told)
        for step in bar(3, "steps"):
            table(step, *[ALARM] * (step == 1))
            if step == 1:
                tqdm.write("written")
        LOGGER.removeHandler(told)
        lines = shown(terminal)
        assert lines[0].startswith("step 1: warning: blocks.0, head 1: exploding: The largest score is 15.")
        assert lines[-7:] == [
            "written",
            "steps 100",
            *standing(2),
            "warning: blocks.0, head 1: The largest score is 15.",
        ]
        table.close()


def test_a_bar_that_comes_later_finds_it_left_standing(terminal, table):
    with terminal:
        table(0)
        print("printed")
        sys.stderr.write("told\n")
        assert shown(terminal) == ["printed", "told", *standing(0)]
        for _ in bar(2, "validation"):
            pass
        assert shown(terminal) == ["printed", "told", *standing(0), "validation 100"]
        table(1)
        table(2)
        assert shown(terminal) == ["printed", "told", *standing(0), "validation 100", *standing(2)]
        table.close()
        assert sys.stderr is terminal.file


def test_a_loop_that_is_broken_off_leaves_bar_and_table_whole(terminal, table):
    with terminal:
        for step in bar(4, "steps"):
            table(step)
            if step == 1:
                break
        assert shown(terminal) == ["steps 25", *standing(1)]
        table.close()
        assert shown(terminal) == ["steps 25", *standing(1)]


def test_above_bars_of_rich_a_table_stands_at_every_sampled_step(terminal, table, monkeypatch):
    with terminal:
        monkeypatch.setattr(rich, "_console", Console())
        with Progress("{task.description} {task.completed}", auto_refresh=False) as progress:
            task = progress.add_task("steps")
            for step in range(2):
                table(step)
                progress.update(task, advance=1, refresh=True)
            assert shown(terminal) == [*standing(0), *standing(1), "steps 2"]
        table.close()
        assert shown(terminal) == [*standing(0), *standing(1), "steps 2"]
