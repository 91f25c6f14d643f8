"""What measuring costs, in the terminal and as the README's table."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table


def show_costs(costs: Sequence[dict[str, Any]], console: Console | None = None) -> None:
    """Print each case with its variants, as ratios to plain SDPA."""
    console = console or Console()
    for title, group in groupby(costs, key=_title):
        console.print(f"\n{title}", style="bold", highlight=False)
        table = Table("variant", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("ms", "× plain", "quartiles", "peak MB"):
            table.add_column(heading, justify="right")
        for cost in group:
            low, high = cost["quartiles"]
            peak = "" if cost["peak_bytes"] is None else f"{cost['peak_bytes'] / 1e6:,.0f}"
            row = f"{cost['milliseconds']:.3g}", f"{cost['ratio']:.3f}", f"{low:.3f}–{high:.3f}", peak
            table.add_row(cost["variant"], *row)
        console.print(table)


def markdown_table(costs: Sequence[dict[str, Any]]) -> str:
    """One line a case: what attnscale's statistics, and eager ones, cost over plain SDPA."""
    columns = ("attnscale, every row", "attnscale, 64 rows", "eager with statistics")
    lines = ["| case | exact statistics | 64 rows | eager with statistics |", "|---|---|---|---|"]
    for title, group in groupby(costs, key=_title):
        found = {cost["variant"]: f"{cost['ratio']:.2f}×" for cost in group}
        lines.append(f"| {title} | {' | '.join(found.get(column, '–') for column in columns)} |")
    return "\n".join(lines)


def _title(cost: dict[str, Any]) -> str:
    case = cost["case"]
    shape = f"({case['batch']}, {case['heads']}, {case['length']}, {case['head_dim']})"
    causal = ", causal" if case["is_causal"] else ""
    return f"{shape} {case['dtype']}{causal}, {'forward and backward' if case['backward'] else 'forward'}"
