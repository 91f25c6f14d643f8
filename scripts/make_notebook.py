"""Make the notebook of the lesson from its pages: text, code cells, and the outputs that the pages show.

python scripts/make_notebook.py                 writes docs/lesson/worksheet.ipynb from worksheet.md and solutions.md
"""

import json
import re
from pathlib import Path
from typing import Any

LESSON = Path(__file__).parents[1] / "docs" / "lesson"
PAGES = ("worksheet.md", "solutions.md")
NOTEBOOK = LESSON / "worksheet.ipynb"
CODE = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text[^\n]*\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL
)


def cells_of(page: str) -> list[dict[str, Any]]:
    """Return the cells of a page: what is between its code blocks, and these with their outputs."""
    cells, at = [], 0
    for block in CODE.finditer(page):
        cells += [_text(page[at : block.start()]), _code(block["code"], block["output"])]
        at = block.end()
    return [cell for cell in [*cells, _text(page[at:])] if cell["source"]]


def _text(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": _lines(source)}


def _code(source: str, output: str | None) -> dict[str, Any]:
    outputs = [{"name": "stdout", "output_type": "stream", "text": _lines(output)}] if output else []
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": outputs, "source": _lines(source)}


def _lines(text: str) -> list[str]:
    return text.strip("\n").splitlines(keepends=True)


def notebook() -> str:
    """Return the notebook as JSON."""
    cells = [cell for page in PAGES for cell in cells_of((LESSON / page).read_text(encoding="utf-8"))]
    count = 0
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
        if cell["cell_type"] == "code":
            cell["execution_count"] = count = count + 1
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(), encoding="utf-8")
