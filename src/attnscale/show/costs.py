"""What measuring costs, in the terminal."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from attnscale.plain import readable

HEADINGS = ("timed as", "ms", "× plain", "quartiles", "peak MB", "host µs")


def show_costs(costs: Sequence[dict[str, Any]]) -> None:
    """Print each case with its variants, as ratios to plain SDPA: on the device alone, and called from Python."""
    console = Console()
    for title, group in groupby(costs, key=title_of):
        console.print(f"\n{title}", style="bold", highlight=False)
        console.print(_table([line for cost in group for line in _lines(cost)]))


def _table(lines: Sequence[tuple[str, ...]]) -> Table:
    table = Table("variant", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    staying = [position for position in range(len(HEADINGS)) if any(line[position + 1] for line in lines)]
    for position in staying:
        table.add_column(HEADINGS[position], justify="right", no_wrap=True)
    for line in lines:
        table.add_row(line[0], *(line[position + 1] for position in staying))
    return table


def _lines(cost: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    peak = "" if cost["peak_bytes"] is None else f"{cost['peak_bytes'] / 1e6:,.0f}"
    host = "" if cost["host_microseconds"] is None else f"{cost['host_microseconds']:.0f}"
    first, *others = [(way, *_cells(cost[way])) for way in ("graph", "calls") if cost[way]]
    yield (cost["variant"], *first, peak, host)
    for cells in others:
        yield ("", *cells, "", "")


def _cells(timing: dict[str, Any]) -> tuple[str, str, str]:
    low, high = timing["quartiles"]
    return readable(timing["milliseconds"]), f"{timing['ratio']:.3f}", f"{low:.3f}–{high:.3f}"


def title_of(cost: dict[str, Any]) -> str:
    """Return what was timed: shape, dtype and passes."""
    case = cost["case"]
    passes = "forward and backward" if case["backward"] else "forward"
    causal = ", causal" if case["is_causal"] else ""
    if case.get("lengths"):
        sizes = f"{len(case['lengths'])} sequences of {min(case['lengths'])} to {max(case['lengths'])}"
        return f"{sizes}, {case['heads']} heads of {case['head_dim']}, {case['dtype']}{causal}, {passes}"
    names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
    shape = f"({', '.join(str(case[name]) for name in names)})"
    return f"{shape} {case['dtype']}{causal}, {passes}"
