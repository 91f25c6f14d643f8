"""Parts of a report, and the code that all pages share. A page fetches nothing, and escapes every name."""

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

MATTER = 3  # notes shown; the others are folded
LONG = 24  # longer tables scroll in their own box
FEW = 6  # up to here, views are buttons; more become a list
SCRIPTS = ("draw.js", "report/chart.js", "report/heat.js", "report/page.js")


@dataclass(frozen=True)
class Note:
    """Finding on a page: its severity (`tone`: error, warning, note or fine), message, place and advice."""

    tone: str
    tag: str
    message: str
    code: str = ""
    place: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Terms:
    """List of terms with their meanings, or of settings with their values."""

    entries: Mapping[str, str]


Block = str | Table | Terms | tuple[Figure, ...]


@dataclass(frozen=True)
class Section:
    """Heading with its blocks; figures in one tuple are shown side by side if they fit."""

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
    lead: tuple[str, ...] = field(default=())  # paragraphs under the verdict


def render(page: Page) -> str:
    """Return the page as a string. Only the script with our hash may run, so a name cannot inject one."""
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
    """Return the name by which the template knows the kind of a block."""
    return {str: "text", Table: "table", Terms: "terms", tuple: "figures"}[type(block)]


def environment() -> Environment:
    """Return the templates' environment; it escapes HTML and unprintable characters in everything but Markup."""
    made = Environment(loader=PackageLoader("attnscale.show"), autoescape=True, undefined=StrictUndefined)
    made.trim_blocks = made.lstrip_blocks = True
    # names may contain characters that reverse the direction of text
    made.finalize = lambda value: printable_lines(value) if type(value) is str else value
    return made


def source(templates: Environment, *names: str) -> str:
    """Return the unrendered template files, joined."""
    assert templates.loader is not None
    return "\n".join(templates.loader.get_source(templates, name)[0] for name in names)


def code(script: str) -> Markup:
    """Return our own code as it must be written in a script element."""
    return Markup(script.replace("</script", "<\\/script"))


def data(value: object) -> Markup:
    """Return JSON for a script element, without `<`: the element would end at the first `</script`."""
    written = json.dumps(value, allow_nan=False)
    return Markup(written.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def policy(*scripts: str) -> str:
    """Return a content security policy: fetch nothing, run only these scripts; embedded images are needed for maps."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii") for script in scripts)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    own = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; {own}"
