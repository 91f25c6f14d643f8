"""Run notebooks from top to bottom in a Jupyter kernel and keep what they show.

python scripts/run_notebook.py examples/quickstart.ipynb        writes the outputs into the file
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

SECONDS = 600  # for one cell, on a busy machine
QUIET = {"PYTHONWARNINGS": "ignore:IProgress not found"}  # tqdm names a path of this machine if ipywidgets is missing
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def run(path: Path) -> nbformat.NotebookNode:
    """Return the notebook with its outputs renewed; a cell that fails raises CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", record_timing=False, resources=folder)
    client.execute(env=os.environ | QUIET)
    notebook.metadata = METADATA
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # so that two runs differ in their numbers alone
    return notebook


if __name__ == "__main__":
    for each in map(Path, sys.argv[1:]):
        nbformat.write(run(each), each)
