"""What mkdocs calls: pages completed from the code they describe, and formulas as MathML, which needs no script."""

import html
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.tools.generated import with_commands, with_findings, with_rules, with_statistics
from docs.tools.results import with_results

COMPLETED = {
    "rules.md": with_rules,
    "findings.md": with_findings,
    "guides/statistics.md": with_statistics,
    "command-line.md": with_commands,
    "results/index.md": with_results,
}
FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.+?)\\[)\]]</(?P=tag)>', re.DOTALL)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Complete a page from the code."""
    complete = COMPLETED.get(page.file.src_uri)
    return markdown if complete is None else complete(markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML."""
    return FORMULA.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match["tag"] == "div" else "inline"
    formula = convert(html.unescape(match["tex"]).strip(), display=display)
    return f'<div class="math-block">{formula}</div>' if display == "block" else formula
