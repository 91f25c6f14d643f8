"""Source files that pages link to, as pages of the site: one link works in the repository and in what is built.

A link whose text is a name in code font, `[`Watcher`](../src/attnscale/watching/watcher.py)`, leads to where that name
is defined.
"""

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).parents[2]
FOLDER = "source"  # of the site
LINK = re.compile(r"\[(?P<text>[^\]\n]+)\]\((?P<target>(?:\.\./)+[\w./-]+\.py)\)")


def linked(markdown: str, page: str) -> Iterator[tuple[str, str]]:
    """The text and the path in the repository of every link from a page of docs to a source file that is there."""
    for match in LINK.finditer(markdown):
        path = _path(match["target"], page)
        if (ROOT / path).is_file():
            yield match["text"].strip("`"), path


def with_source_links(markdown: str, page: str) -> str:
    """The same page with its links to source files leading to their pages, and to the line that defines a name."""

    def led(match: re.Match[str]) -> str:
        path = _path(match["target"], page)
        if not (ROOT / path).is_file():
            return match[0]  # a broken link, which mkdocs will tell of
        line = definitions(ROOT / path).get(match["text"].strip("`"))
        target = posixpath.relpath(page_of(path), posixpath.dirname(page) or ".")
        return f"[{match['text']}]({target}{'' if line is None else f'#L{line}'})"

    return LINK.sub(led, markdown)


def page_of(path: str) -> str:
    """The page of the site that shows a source file."""
    return f"{FOLDER}/{path}.md"


def source_page(path: str) -> str:
    """A source file as a page, each line an anchor; the search passes it over."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).splitlines()
    width = len(str(len(lines)))
    code = "".join(  # each line a block of its own
        f'<span id="L{number}" class="line"><span data-linenos="{number:>{width}} "></span>{line}</span>'
        for number, line in enumerate(lines, start=1)
    ).replace("`", "&#96;")  # which Markdown would read
    head = f"---\ntitle: {path}\nhide: [navigation, toc]\nsearch:\n  exclude: true\n---\n"
    block = f'<div class="highlight source"><pre><code>{code}\n</code></pre></div>'
    return f"{head}\n# `{path}` {{ .source-path }}\n\n{block}\n"


def definitions(path: Path) -> dict[str, int]:
    """The lines that define the classes, functions and constants of a module, members as `Class.member`."""
    return dict(_defined(ast.parse(path.read_text(encoding="utf-8")).body, ""))


def _defined(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, int]]:
    for node in body:
        match node:
            case ast.ClassDef(name=name, body=members):
                yield prefix + name, node.lineno
                yield from _defined(members, f"{prefix}{name}.")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield prefix + name, node.lineno
            case ast.Assign(targets=targets):
                names = (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
                yield from ((prefix + name, node.lineno) for name in names)
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name, node.lineno


def _path(target: str, page: str) -> str:
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
