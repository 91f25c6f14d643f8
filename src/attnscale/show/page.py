"""Pages: what a report is made of, and what every page shares. A page fetches nothing, and names in it are data."""

import base64
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from attnscale import __version__
from attnscale.plain import printable_lines
from attnscale.show.figures import Figure
from attnscale.show.tables import Table

MATTER = 3  # notes shown before the fold
LONG = 24  # lines of a table: longer ones scroll in a box of their own
FEW = 6  # views that are buttons; more are a list
SCRIPTS = ("draw.js", "report/chart.js", "report/heat.js", "report/page.js")


@dataclass(frozen=True)
class Note:
    """One thing to know: how bad (`tone`: error, warning, note or fine), what, where, and what to do."""

    tone: str
    tag: str
    message: str
    code: str = ""
    place: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Terms:
    """Words and what they mean, or settings and what they were."""

    entries: Mapping[str, str]


Block = str | Table | Terms | tuple[Figure, ...]


@dataclass(frozen=True)
class Section:
    """A heading and its blocks; figures in one tuple stand side by side where there is room."""

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
    """A report: its subject, the verdict in one sentence, what matters, and the rest."""

    kind: str  # the command it comes from
    title: str
    verdict: str
    tone: str
    notes: tuple[Note, ...]
    sections: tuple[Section, ...]
    lead: tuple[str, ...] = field(default=())  # paragraphs under the verdict


def render(page: Page) -> str:
    """Return the page as a string; its script runs by its hash only, so nothing that a name contains ever would."""
    templates = environment()
    script = code(source(templates, *SCRIPTS))
    return templates.get_template("report/page.html.j2").render(
        page=page,
        shown=MATTER,
        few=FEW,
        long=LONG,
        kind_of=kind_of,
        figures=data({figure.name: figure.to_json() for section in page.sections for figure in section.figures}),
        policy=policy(script),
        style=code(source(templates, "base.css", "report/page.css")),
        script=script,
        versions=f"attnscale {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    )


def kind_of(block: Block) -> str:
    """Return how the template shows a block."""
    return {str: "text", Table: "table", Terms: "terms", tuple: "figures"}[type(block)]


def environment() -> Environment:
    """Return the templates; everything that is not marked as code is escaped, for a page and for a reader."""
    made = Environment(loader=PackageLoader("attnscale.show"), autoescape=True, undefined=StrictUndefined)
    made.trim_blocks = made.lstrip_blocks = True
    # names may bring marks that turn the direction of text
    made.finalize = lambda value: printable_lines(value) if type(value) is str else value
    return made


def source(templates: Environment, *names: str) -> str:
    """Return files among the templates as they are, one after the other."""
    assert templates.loader is not None
    return "\n".join(templates.loader.get_source(templates, name)[0] for name in names)


def code(script: str) -> Markup:
    """Return our own code, to stand in a script element."""
    return Markup(script.replace("</script", "<\\/script"))


def data(value: object) -> Markup:
    """Return JSON to stand in a script element, which ends at the first `</script` whatever surrounds it."""
    written = json.dumps(value, allow_nan=False)
    return Markup(written.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def policy(*scripts: str) -> str:
    """Return a content policy: nothing is fetched, and only these scripts run. A report paints maps into images."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii") for script in scripts)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    own = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; {own}"
