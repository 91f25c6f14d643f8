"""Print the table of costs in docs/speed.md from the recorded results: `python benchmarks/table.py`.

With the path of a file from `attnscale bench --out FILE`, print its tables of dense and ragged batches.
"""

import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from attnscale.show.listings import title_of

RESULTS = Path(__file__).parent / "results"


def markdown_table(costs: Sequence[dict[str, Any]]) -> str:
    """Return a table with the cost of statistics, all of them read, relative to plain SDPA, for each case.

    If a CUDA graph was timed too, its ratio, without host time, comes first. The ratio of calls from Python follows,
    with the host time of one call.
    """
    columns = {
        "exact, read": "attnscale, every row",
        "64 rows, read": "attnscale, 64 rows",
        "eager with statistics": "eager with statistics",
    }
    return _markdown([cost for cost in costs if not cost["case"].get("lengths")], columns)


def ragged_table(costs: Sequence[dict[str, Any]]) -> str:
    """Return the table of ragged batches, relative to plain SDPA on a batch with as many tokens."""
    columns = {
        "packed, no statistics": "attnscale, packed",
        "exact, read": "attnscale, packed, every row",
        "64 rows, read": "attnscale, packed, 64 rows",
        "jagged, exact, read": "attnscale, jagged, every row",
        "jagged, 64 rows, read": "attnscale, jagged, 64 rows",
        "torch's varlen_attn, no statistics": "torch's varlen_attn",
        "torch's jagged SDPA, none": "torch's SDPA, jagged",
        "padded, none": "padded, with a mask",
    }
    return _markdown([cost for cost in costs if cost["case"].get("lengths")], columns)


def _markdown(costs: Sequence[dict[str, Any]], columns: dict[str, str]) -> str:
    lines = [f"| case | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for title, group in groupby(costs, key=title_of):
        found = {cost["variant"]: _ratios(cost) for cost in group}
        lines.append(f"| {title} | {' | '.join(found.get(variant, '–') for variant in columns.values())} |")
    return "\n".join(lines)


def _ratios(cost: dict[str, Any]) -> str:
    calls, host = f"{cost['calls']['ratio']:.2f}×", cost["host_microseconds"]
    called = calls if host is None else f"{calls}, {host:.0f} µs"
    return called if cost["graph"] is None else f"{cost['graph']['ratio']:.2f}× ({called})"


def table() -> str:
    """Return the table of the H200."""
    recorded = json.loads((RESULTS / "h200.json").read_text(encoding="utf-8"))
    return markdown_table(recorded["costs"])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["costs"]
        print(markdown_table(given), ragged_table(given), sep="\n\n")
    else:
        print(table())
