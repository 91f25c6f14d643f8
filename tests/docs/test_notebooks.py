"""The notebooks of the examples are committed with their outputs, and run from top to bottom in a Jupyter kernel."""

import re
import runpy
from html import unescape

import nbformat
import pytest

from tests.docs.blocks import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
run = runpy.run_path(str(ROOT / "scripts/run_notebook.py"))["run"]


def shown(notebook):
    """Yield the output of each code cell, without numbers, times and tags: as text, HTML, or the kind of a picture."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            yield " ".join(text for output in cell.outputs for text in texts_of(output))


def texts_of(output):
    if output.output_type == "stream":
        yield output.text
    data = output.get("data", {})
    yield unescape(re.sub(r"<[^>]+>", " ", data.get("text/html", "")))
    yield from (kind for kind in data if kind.startswith("image/"))


def verdicts(texts):
    return [text.split(":")[0] for text in texts if text.strip().startswith(("Fine", "Not fine", "No head"))]


@pytest.mark.parametrize("cells", [4, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_shows_what_is_committed(path, cells, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = notebook.cells[:cells]
    committed = list(shown(notebook))
    nbformat.write(notebook, tmp_path / path.name)
    now = list(shown(run(tmp_path / path.name)))
    assert [bool(text) for text in now] == [bool(text) for text in committed]
    assert verdicts(now) == verdicts(committed)
    unwanted = ("Warning", "Traceback", f"{ROOT}/", "/home/")
    assert not any(word in text for text in (*now, *committed) for word in unwanted)


def test_the_quickstart_finds_the_bug_fixes_it_and_watches_a_run_that_hurts():
    notebook = nbformat.read(ROOT / "examples/quickstart.ipynb", as_version=4)
    texts = [text.strip() for text in shown(notebook)]
    assert [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"] == [*range(1, len(texts) + 1)]
    healthy, bug, changed, fixed = verdicts(texts)
    assert "scaled_by_dim" in texts[2]
    assert (healthy.split()[0], bug.split()[0], fixed.split()[0]) == ("Fine", "Not", "Fine")
    assert changed.startswith("No head")
    assert any(text.startswith("Step ") and "exploding" in text for text in texts)
    fast, slow = (float(loss) for loss in re.findall(r"rate \S+ loss (\S+),", " ".join(texts)))
    assert fast > slow + 0.2
    assert "image/png" in texts[-1]
