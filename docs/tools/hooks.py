"""Hooks of mkdocs: the site does not contain the source code, so links to it lead to the repository."""

import re
from typing import Any

SOURCE = re.compile(r"\]\((?:\.\./)+(?=(?:src|tests|examples|benchmarks|scripts)/|(?:CHANGELOG|CONTRIBUTING)\.md)")


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Lead links to files outside docs to the repository."""
    return SOURCE.sub(f"]({config.extra['repository']}/blob/HEAD/", markdown)
