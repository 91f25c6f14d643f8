"""Costs of measuring, in the terminal."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console

from attnscale.plain import readable
from attnscale.show.tables import Column, Row, Table
from attnscale.show.terminal import print_table, say

# Meaning of each column.
COLUMNS = {
    "timed as": "'calls' from Python, or 'graph', a CUDA graph, which excludes the host's time",
    "ms": "milliseconds of one call",
    "× plain": "time relative to the fastest plain SDPA, timed in the same rounds; median over rounds",
    "quartiles": "first and third quartile of that ratio over rounds",
    "peak MB": "peak memory, without the inputs",
    "host µs": "time until a call returns, on an idle GPU",
}
SHAPE = "(batch, heads, key heads, queries, keys, d_k)"


def show_costs(costs: Sequence[dict[str, Any]]) -> None:
    """Print the timings of each case and their ratios to plain SDPA, for calls from Python and for CUDA graphs."""
    console, groups = Console(), {title: [_lines(cost) for cost in group] for title, group in groupby(costs, title_of)}
    every = [line for group in groups.values() for lines in group for line in lines]
    staying = [at for at in range(len(COLUMNS)) if len({line[at + 1] for line in every} - {""}) > (at == 0)]
    headings = list(COLUMNS)
    columns = (Column("variant", is_text=True), *(Column(headings[at]) for at in staying))

    def row(line: tuple[str, ...]) -> Row:
        return Row((line[0], *(line[at + 1] for at in staying)))

    rows = ((title, tuple(row(line) for lines in group for line in lines)) for title, group in groups.items())
    print_table(Table(columns, tuple(rows)), console)
    console.print()
    for sentence in (f"Titles show {SHAPE}.", *(f"{headings[at]}: {COLUMNS[headings[at]]}" for at in staying)):
        say(sentence, console, "dim")


def _lines(cost: dict[str, Any]) -> list[tuple[str, ...]]:
    peak = "" if cost["peak_bytes"] is None else f"{cost['peak_bytes'] / 1e6:,.0f}"
    host = "" if cost["host_microseconds"] is None else f"{cost['host_microseconds']:.0f}"
    first, *others = [(mode, *_cells(cost[mode])) for mode in ("graph", "calls") if cost[mode]]
    return [(cost["variant"], *first, peak, host), *(("", *cells, "", "") for cells in others)]


def _cells(timing: dict[str, Any]) -> tuple[str, str, str]:
    low, high = timing["quartiles"]
    return readable(timing["milliseconds"]), f"{timing['ratio']:.3f}", f"{low:.3f}–{high:.3f}"


def title_of(cost: dict[str, Any]) -> str:
    """Return the title of a case: its shape, dtype and passes."""
    case = cost["case"]
    passes = "forward and backward" if case["backward"] else "forward"
    causal = ", causal" if case["is_causal"] else ""
    if case.get("lengths"):
        sizes = f"{len(case['lengths'])} sequences of {min(case['lengths'])} to {max(case['lengths'])}"
        return f"{sizes}, {case['heads']} heads of {case['head_dim']}, {case['dtype']}{causal}, {passes}"
    names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
    shape = f"({', '.join(str(case[name]) for name in names)})"
    return f"{shape} {case['dtype']}{causal}, {passes}"
