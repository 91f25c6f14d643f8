"""Parts of a report, and the frame that all pages share. A page fetches nothing, and escapes every name.

Figures are data, which templates/ draws. Names come from users and are drawn as text.
"""

import base64
import hashlib
import json
import math
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from importlib import resources
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from attnscale import __version__
from attnscale.plain import printable_lines, rounded
from attnscale.show.tables import Table
from attnscale.show.text import pattern

SHOWN_NOTES = 3  # notes shown; the others are folded
LONG = 24  # longer tables scroll in their own box
FEW = 6  # up to here, views are buttons; more become a list
SCRIPTS = ("draw.js", "report/heat.js", "report/page.js")
STYLES = ("base.css", "report/page.css")
Number = float | int | None
DIGITS = 4  # significant digits of numbers in the page


@dataclass(frozen=True)
class Axis:
    """Title and range of an axis; `ticks` names the positions from 0 on."""

    title: str
    log: bool = False
    ticks: tuple[str, ...] | None = None
    range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    """Curve of y against x, with a band from `low` to `high` if both are set; related series share a `tone`."""

    name: str
    x: Sequence[Number]
    y: Sequence[Number] = ()  # empty: draw only the band
    low: Sequence[Number] = ()
    high: Sequence[Number] = ()
    tone: int | str = 0  # one of eight colours; "ink" for values that are not measured
    dashed: bool = False
    marks: bool = False  # draw a mark at each point
    points: tuple[str, ...] = ()  # a name for each point


@dataclass(frozen=True)
class Chart:
    """Series over one pair of axes, and a `notice` that states the main result."""

    series: tuple[Series, ...]
    x: Axis
    y: Axis
    notice: str = ""
    kind: str = "chart"


@dataclass(frozen=True)
class Heat:
    """Map of values[row][column], coloured from `low` to `high`; `log` colours by the logarithm."""

    values: Sequence[Sequence[Number]]
    x: Axis
    y: Axis
    unit: str
    rows: tuple[str, ...]  # full names
    low: float
    high: float
    notice: str = ""
    log: bool = False
    diverging: bool = False  # one colour above zero, another below
    errors: Sequence[Sequence[Number]] | None = None  # standard errors
    bounds: Sequence[Sequence[Number]] | None = None  # upper bounds, if the values are lower bounds
    columns: tuple[str, ...] | None = None  # names; None numbers them from 0
    column: str = "head"
    kind: str = "heat"


@dataclass(frozen=True)
class Figure:
    """Figure with one view, or with several and a switch between them."""

    name: str
    views: Mapping[str, Chart | Heat]
    choose: str = "Show"
    caption: str = ""

    @property
    def is_map(self) -> bool:
        """True if the figure has a map, whose fields can be read with the pointer or the keyboard."""
        return any(isinstance(view, Heat) for view in self.views.values())

    def to_json(self) -> list[Any]:
        """Return the views as JSON for the page's script; numbers are rounded, NaN and infinity become None."""
        return [_plain(view) for view in self.views.values()]


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {name: _plain(own) for name, own in vars(value).items()}
    if isinstance(value, list | tuple):
        return [_plain(own) for own in value]
    return rounded(value, DIGITS) if isinstance(value, float) else value


def ticks(names: Sequence[str]) -> tuple[str, ...]:
    """Return a label for each layer: its number if all numbers differ, else its name."""
    numbers = [pattern(name)[1] for name in names]
    return tuple(numbers if all(numbers) and len(set(numbers)) == len(names) else names)


def known_values(values: Iterable[Number]) -> list[float]:
    """Return the finite numbers among values."""
    return [value for value in values if value is not None and math.isfinite(value)]


def mean(values: Iterable[Number]) -> float:
    """Return the mean of the finite numbers among values; NaN if there are none."""
    known = known_values(values)
    return math.fsum(known) / len(known) if known else math.nan


@dataclass(frozen=True)
class Note:
    """Finding on a page: its severity (`tone`: error, warning, note or fine), message, place and advice."""

    tone: str
    tag: str
    message: str
    code: str = ""
    place: str = ""
    advice: str = ""


# A paragraph, a table, terms with their meanings, or figures that are shown side by side if they fit.
Block = str | Table | Mapping[str, str] | tuple[Figure, ...]


@dataclass(frozen=True)
class Section:
    """Heading with its blocks."""

    name: str
    title: str
    blocks: tuple[Block, ...]

    @property
    def figures(self) -> Iterator[Figure]:
        """The figures of the section."""
        for block in self.blocks:
            if isinstance(block, tuple):
                yield from block


@dataclass(frozen=True)
class Page:
    """Report: title, verdict in one sentence, the findings, and the sections."""

    kind: str  # the command that made it
    title: str
    verdict: str
    tone: str
    notes: tuple[Note, ...]
    sections: tuple[Section, ...]
    lead: tuple[str, ...] = ()  # paragraphs under the verdict
    notes_title: str = "What matters"


def render(page: Page) -> str:
    """Return a report as a string."""
    figures = {figure.name: figure.to_json() for section in page.sections for figure in section.figures}
    versions = f"attnscale {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    parts = {"page": page, "shown": SHOWN_NOTES, "few": FEW, "long": LONG, "versions": versions}
    return fill("report/page.html.j2", f"{page.title} · {page.kind}", STYLES, SCRIPTS, figures, parts)


def fill(
    template: str, title: str, styles: Sequence[str], scripts: Sequence[str], data: object, parts: Mapping[str, Any]
) -> str:
    """Return a page as a string: a template with its styles, its scripts, and `data` for these as JSON.

    Only the script with our hash may run, so a name cannot inject one.
    """
    templates = Environment(loader=PackageLoader("attnscale.show"), autoescape=True, undefined=StrictUndefined)
    templates.trim_blocks = templates.lstrip_blocks = True
    # names may contain characters that reverse the direction of text
    templates.finalize = lambda value: printable_lines(value) if type(value) is str else value
    script = read_templates(*scripts)
    return templates.get_template(template).render(
        **parts,
        title=title,
        style=Markup(read_templates(*styles)),
        script=Markup(script),
        policy=_policy(script),
        data=_json_markup(data),
    )


def read_templates(*names: str) -> str:
    """Return files of templates/, joined."""
    folder = resources.files("attnscale.show") / "templates"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def _json_markup(value: object) -> Markup:
    """Return JSON for a script element, without `<`: the element would end at the first `</script`."""
    written = json.dumps(value, allow_nan=False)
    return Markup(written.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _policy(script: str) -> str:
    """Return a content security policy: fetch nothing, run only this script; embedded images are needed for maps."""
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    own = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src 'sha256-{digest}'; {own}"
