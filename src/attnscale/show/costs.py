"""Costs of measuring, in the terminal."""

from collections.abc import Sequence
from itertools import chain, groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnscale.plain import readable

# Meaning of each column.
COLUMNS = {
    "timed as": "calls, from Python; or graph, a CUDA graph, which leaves out the host's time",
    "ms": "milliseconds of one call",
    "× plain": "time over that of the fastest plain SDPA, timed right beside it; median over rounds",
    "quartiles": "of that ratio",
    "peak MB": "memory beside the inputs",
    "host µs": "time until a call returns, on an idle GPU",
}
SHAPE = "(batch, heads, key heads, queries, keys, d_k)"


def show_costs(costs: Sequence[dict[str, Any]]) -> None:
    """Print each case with its variants, as ratios to plain SDPA: on the device alone, and called from Python."""
    console, lines = Console(), {title: list(map(_lines, group)) for title, group in groupby(costs, key=title_of)}
    every = [line for group in lines.values() for cost in group for line in cost]
    staying = [at for at in range(len(COLUMNS)) if len({line[at + 1] for line in every} - {""}) > (at == 0)]
    for title, group in lines.items():
        console.print(f"\n{title}", style="bold", highlight=False)
        table = Table("variant", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for at in staying:
            table.add_column(list(COLUMNS)[at], justify="right", no_wrap=True)
        for line in chain.from_iterable(group):
            table.add_row(line[0], *(line[at + 1] for at in staying))
        console.print(table)
    meanings = [f"{name}: {meaning}" for at, (name, meaning) in enumerate(COLUMNS.items()) if at in staying]
    console.print(Text("\n" + "\n".join([f"Titles are {SHAPE}.", *meanings]), style="dim"))


def _lines(cost: dict[str, Any]) -> list[tuple[str, ...]]:
    peak = "" if cost["peak_bytes"] is None else f"{cost['peak_bytes'] / 1e6:,.0f}"
    host = "" if cost["host_microseconds"] is None else f"{cost['host_microseconds']:.0f}"
    first, *others = [(way, *_cells(cost[way])) for way in ("graph", "calls") if cost[way]]
    return [(cost["variant"], *first, peak, host), *(("", *cells, "", "") for cells in others)]


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
