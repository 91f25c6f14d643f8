"""What measuring costs, in the terminal and as the README's table."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table


def show_costs(costs: Sequence[dict[str, Any]]) -> None:
    """Print each case with its variants, as ratios to plain SDPA: on the device alone, and called from Python."""
    console = Console()
    for title, group in groupby(costs, key=_title):
        console.print(f"\n{title}", style="bold", highlight=False)
        table = Table("variant", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("timed as", "ms", "× plain", "quartiles", "peak MB"):
            table.add_column(heading, justify="right")
        for cost in group:
            peak = "" if cost["peak_bytes"] is None else f"{cost['peak_bytes'] / 1e6:,.0f}"
            first, *others = [(way, *_cells(cost[way])) for way in ("graph", "calls") if cost[way]]
            table.add_row(cost["variant"], *first, peak)
            for cells in others:
                table.add_row("", *cells)
        console.print(table)


def _cells(timing: dict[str, Any]) -> tuple[str, str, str]:
    low, high = timing["quartiles"]
    return f"{timing['milliseconds']:.3g}", f"{timing['ratio']:.3f}", f"{low:.3f}–{high:.3f}"


def markdown_table(costs: Sequence[dict[str, Any]]) -> str:
    """One line a case: what attnscale's statistics, and eager ones, cost over plain SDPA.

    Where a CUDA graph was timed too, its ratio, the device's own, stands first and that of calls behind it.
    """
    columns = ("attnscale, every row", "attnscale, 64 rows", "eager with statistics")
    lines = ["| case | exact statistics | 64 rows | eager with statistics |", "|---|---|---|---|"]
    for title, group in groupby(costs, key=_title):
        found = {cost["variant"]: _ratios(cost) for cost in group}
        lines.append(f"| {title} | {' | '.join(found.get(column, '–') for column in columns)} |")
    return "\n".join(lines)


def _ratios(cost: dict[str, Any]) -> str:
    calls = f"{cost['calls']['ratio']:.2f}×"
    return calls if cost["graph"] is None else f"{cost['graph']['ratio']:.2f}× ({calls})"


def _title(cost: dict[str, Any]) -> str:
    case = cost["case"]
    shape = f"({case['batch']}, {case['heads']}, {case['length']}, {case['head_dim']})"
    causal = ", causal" if case["is_causal"] else ""
    return f"{shape} {case['dtype']}{causal}, {'forward and backward' if case['backward'] else 'forward'}"
