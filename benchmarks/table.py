"""Print the README's table of costs from the recorded results: `python benchmarks/table.py`."""

import json
from pathlib import Path

from attnscale.show.costs import markdown_table

RESULTS = Path(__file__).parent / "results"


def table() -> str:
    """The cases of the H200 and of two CPU cores, in one table."""
    recorded = [json.loads((RESULTS / name).read_text(encoding="utf-8")) for name in ("h200.json", "cpu.json")]
    return markdown_table([cost for result in recorded for cost in result["costs"]])


if __name__ == "__main__":
    print(table())
