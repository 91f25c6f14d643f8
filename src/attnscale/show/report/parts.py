"""What a report is made of, whatever it reports on: a verdict, notes, and sections of text, tables and figures."""

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from attnscale import __version__
from attnscale.show.page import code, data, pages, policy, source
from attnscale.show.report.figures import Figure

MATTER = 3  # notes shown before the fold
LONG = 24  # lines of a table
SCRIPTS = tuple(f"report/{name}.js" for name in ("theme", "axes", "chart", "heat", "page"))
FEW = 6  # views that are buttons; more are a list


@dataclass(frozen=True)
class Note:
    """One thing to know: how bad (`tone`: error, warning, note, fine or fact), what, where, and what to do."""

    tone: str
    tag: str
    message: str
    code: str = ""
    place: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Row:
    """One line of a table, as it is shown."""

    cells: tuple[str, ...]
    name: str = ""  # in full, where the first cell is a short one
    tone: str = ""  # of the last cell
    current: bool = False


@dataclass(frozen=True)
class Table:
    """Lines under titles of their own, or under none; columns named in `text` are not numbers."""

    columns: tuple[str, ...]
    groups: tuple[tuple[str, tuple[Row, ...]], ...]
    text: frozenset[int] = frozenset({0})
    caption: str = ""

    @property
    def is_long(self) -> bool:
        """Whether it scrolls in a box of its own on a screen."""
        return sum(len(rows) for _, rows in self.groups) > LONG


@dataclass(frozen=True)
class Terms:
    """Words and what they mean, or settings and what they were."""

    entries: Mapping[str, str]


Block = str | Table | Terms | tuple[Figure, ...] | tuple[Note, ...]


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it; figures in one tuple stand side by side where there is room."""

    name: str
    title: str
    blocks: tuple[Block, ...]

    @property
    def figures(self) -> Iterator[Figure]:
        """Those in it."""
        for block in self.blocks:
            if isinstance(block, tuple):
                yield from (part for part in block if isinstance(part, Figure))


@dataclass(frozen=True)
class Page:
    """A report: what it is of, the verdict in one sentence, what matters, and the rest."""

    kind: str  # the command it comes from
    title: str
    verdict: str
    tone: str
    notes: tuple[Note, ...]
    sections: tuple[Section, ...]
    lead: tuple[str, ...] = field(default=())  # paragraphs under the verdict


def render(page: Page) -> str:
    """The page, as a string; scripts run by their hash only, so nothing that a name smuggles in ever would."""
    templates = pages()
    script = code(source(templates, *SCRIPTS))
    figures = {figure.name: figure.to_dict() for section in page.sections for figure in section.figures}
    return templates.get_template("report.html.j2").render(
        page=page,
        shown=MATTER,
        few=FEW,
        kind_of=kind_of,
        figures=data(figures),
        policy=policy(script),
        style=code(source(templates, "report.css")),
        script=script,
        versions=versions(),
    )


def kind_of(block: Block) -> str:
    """How the template shows a block."""
    if isinstance(block, tuple):
        return "figures" if block and isinstance(block[0], Figure) else "notes"
    return {str: "text", Table: "table", Terms: "terms"}[type(block)]


def versions() -> str:
    """What made the page."""
    return f"attnscale {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
