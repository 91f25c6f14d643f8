"""What mkdocs calls: pages completed from the code they describe, source files as pages, and formulas as MathML."""

import html
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files, InclusionLevel

sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.tools.generated import with_commands, with_findings, with_rules, with_statistics
from docs.tools.ledger import with_claims
from docs.tools.results import with_results
from docs.tools.source import linked, page_of, source_page, with_source_links

COMPLETED = {
    "rules.md": with_rules,
    "findings.md": with_findings,
    "guides/statistics.md": with_statistics,
    "command-line.md": with_commands,
    "results/index.md": with_results,
    "claims.md": with_claims,
}
FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.+?)\\[)\]]</(?P=tag)>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """A page for every source file that another page links to; it stands in no menu."""
    pages = [(file.content_string, file.src_uri) for file in files.documentation_pages()]
    for path in sorted({path for markdown, page in pages for _, path in linked(markdown, page)}):
        content = source_page(path)
        files.append(File.generated(config, page_of(path), content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Complete a page from the code, and lead its links to the code to pages that show it."""
    complete = COMPLETED.get(page.file.src_uri)
    return with_source_links(markdown if complete is None else complete(markdown), page.file.src_uri)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which needs no script."""
    return FORMULA.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match["tag"] == "div" else "inline"
    formula = convert(html.unescape(match["tex"]).strip(), display=display)
    return f'<div class="math-block">{formula}</div>' if display == "block" else formula
