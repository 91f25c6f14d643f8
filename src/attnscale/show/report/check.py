"""The report of `attnscale check`."""

from collections.abc import Iterable
from typing import Any

from attnscale.checking import Checked, Group, Line
from attnscale.diagnose.what_if import COLUMNS
from attnscale.show.check import columns, place
from attnscale.show.columns import Column
from attnscale.show.naming import by_pattern
from attnscale.show.report.densities import densities
from attnscale.show.report.facts import facts_of_layers
from attnscale.show.report.freezing import freezing
from attnscale.show.report.heads import map_of_layers
from attnscale.show.report.method import errors_of, words_of_models
from attnscale.show.report.parts import MATTER, Block, Note, Page, Row, Section, Table, render
from attnscale.show.report.sharp import sharp_heads
from attnscale.watching.seen import padding_told


def report_page(checked: Checked) -> str:
    """The page, as a string."""
    return render(check_report(checked))


def check_report(checked: Checked) -> Page:
    """What `attnscale check` found, as a report."""
    notes = tuple(map(note_of, checked.groups))
    return Page(
        kind="attnscale check",
        title=checked.title,
        verdict=checked.conclusion,
        tone=checked.audit.worst or "fine",
        notes=notes + tuple(facts_of_layers(checked.audit.layers))[: max(0, MATTER - len(notes))],
        sections=(*(_of_layers(checked) if checked.lines else ()), *_unchecked(checked), _method(checked)),
    )


def _of_layers(checked: Checked) -> tuple[Section, ...]:
    return (
        _layers(checked),
        _heads(checked),
        *_scores(checked),
        _freezing(checked),
        *_sharp(checked),
        *_what_if(checked),
    )


def _unchecked(checked: Checked) -> tuple[Section, ...]:
    told = checked.audit.unchecked
    return (Section("unchecked", "What was not judged", told),) if told else ()


def note_of(group: Group) -> Note:
    """Findings that say the same, told once."""
    first = group.first
    return Note(first.severity, first.severity, first.message, first.code, place(group), first.advice)


def table_of(lines: tuple[Line, ...]) -> Table:
    """Layer by layer."""
    by_name = {line.name: line for line in lines}
    shown = columns()
    groups = tuple(
        (title, tuple(_row(index or "·", by_name[name], shown) for index, name in members))
        for title, members in by_pattern(by_name)
    )
    headings = ("layer", *map(unbroken, shown), "verdict")
    return Table(headings, groups, text=frozenset({0, len(headings) - 1}))


def unbroken(column: Column[Any]) -> str:
    """The heading of a column, in which top-1 does not break."""
    return column.long.replace("-", "\N{NON-BREAKING HYPHEN}")


def _row(index: str, line: Line, shown: Iterable[Column[Line]]) -> Row:
    cells = (column.cell(line) for column in shown)
    return Row((index, *cells, line.judgement), line.name, line.severity or "fine")


def _layers(checked: Checked) -> Section:
    footnotes = tuple(f"{word}: {meaning}" for word, meaning in checked.footnotes.items())
    return Section("layers", "Layer by layer", (table_of(checked.lines), *footnotes))


def _heads(checked: Checked) -> Section:
    return Section("heads", "Head by head", ((map_of_layers("head-map", checked.audit.layers),),))


def _scores(checked: Checked) -> tuple[Section, ...]:
    figure = densities("score-densities", checked.audit.layers)
    return () if figure is None else (Section("scores", "The scores", ((figure,),)),)


def _freezing(checked: Checked) -> Section:
    figure = freezing("freezing-points", checked.audit.layers)
    return Section("freezing", "How far from freezing", ((figure,),))


def _sharp(checked: Checked) -> tuple[Section, ...]:
    figure = sharp_heads("sharp-heads", checked.audit.layers)
    told = "The weights of heads past the freezing point, in the first sequence: a row is what a query looks at."
    return () if figure is None else (Section("sharp", "Where sharp heads look", (told, (figure,))),)


def _what_if(checked: Checked) -> tuple[Section, ...]:
    tried = checked.what_if
    if tried is None:
        return ()
    rows = tuple(Row((row.name, *row.numbers()), current=position == 0) for position, row in enumerate(tried.rows))
    intro = (
        f"Tried on all that was just seen in {checked.focus}, with its own masks, biases and values. The change is "
        "that of the output, over its norm; a dash where it could not be read which values the weights met."
    )
    table = Table(("scale by", *COLUMNS), (("", rows),))
    return (Section("what-if", "What another scale would do", (intro, table)),)


def _method(checked: Checked) -> Section:
    rows = "every row of every head" if checked.rows is None else f"{checked.rows} sampled rows of every head"
    state = "trained" if checked.audit.trained else "at its initialisation"
    told = (
        f"One forward pass on {checked.fed}, on {checked.device}; {rows} was looked at. By its norms and biases the "
        f"model is {state}."
    )
    padding = padding_told(checked.audit.layers.values())
    blocks: tuple[Block, ...] = (
        " ".join([told, *padding, *checked.notes]),
        errors_of(checked.audit.layers),
        words_of_models(),
    )
    return Section("method", "How it was measured", blocks)
