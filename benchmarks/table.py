"""Print the table of costs in docs/speed.md from the recorded results: `python benchmarks/table.py`.

With a file, as `attnscale bench --kind ragged --out FILE` writes it, its tables of dense and of ragged batches.
"""

import json
import sys
from pathlib import Path

from attnscale.show.costs import markdown_table, ragged_table

RESULTS = Path(__file__).parent / "results"


def table() -> str:
    """The cases of the H200."""
    recorded = json.loads((RESULTS / "h200.json").read_text(encoding="utf-8"))
    return markdown_table(recorded["costs"])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["costs"]
        print(markdown_table(given), ragged_table(given), sep="\n\n")
    else:
        print(table())
