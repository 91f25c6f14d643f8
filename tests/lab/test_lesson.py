"""The lesson: its notebook is its pages, runs from top to bottom, and prints what it shows."""

import contextlib
import io
import json
import math
import runpy
from pathlib import Path

import pytest

from tests.docs.blocks import same

ROOT = Path(__file__).parents[2]
LESSON = ROOT / "docs" / "lesson"
MAKE = runpy.run_path(str(ROOT / "scripts/make_notebook.py"))
NOTEBOOK = json.loads((LESSON / "worksheet.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_made_from_the_pages():
    assert (LESSON / "worksheet.ipynb").read_text(encoding="utf-8") == MAKE["notebook"]()
    assert (NOTEBOOK["nbformat"], len({cell["id"] for cell in NOTEBOOK["cells"]})) == (4, len(NOTEBOOK["cells"]))


@pytest.mark.parametrize("page", ["worksheet.md", "solutions.md"])
def test_every_exercise_has_its_time_and_its_solution(page):
    text = (LESSON / page).read_text(encoding="utf-8")
    for number in range(1, 6):
        part = text[text.index(f"Exercise {number}") :]
        assert "minutes" in part[:800], number


def test_the_notebook_runs_from_top_to_bottom_and_prints_what_it_shows():
    names = {"__name__": "__main__"}
    for cell in CODE:
        source = "".join(cell["source"])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(source, "worksheet.ipynb", "exec", dont_inherit=True), names)
        shown = "".join("".join(output["text"]) for output in cell["outputs"])
        is_trained = any(name in source for name in ("trained(", "learn(", "final_loss("))
        assert same(shown, printed.getvalue(), math.inf if is_trained else 0.02), source
