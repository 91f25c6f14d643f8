"""Print the table of costs in docs/speed.md from the recorded results: `python benchmarks/table.py`."""

import json
from pathlib import Path

from attnscale.show.costs import markdown_table

RESULTS = Path(__file__).parent / "results"


def table() -> str:
    """The cases of the H200."""
    recorded = json.loads((RESULTS / "h200.json").read_text(encoding="utf-8"))
    return markdown_table(recorded["costs"])


if __name__ == "__main__":
    print(table())
