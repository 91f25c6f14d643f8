"""Rules, predictions, claims and timings in the terminal."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console, Group
from rich.table import Table as Grid
from rich.text import Text

from attnscale.claims import INDEX, SOURCES, VERDICTS, Claim
from attnscale.claims.judging import ARITHMETIC, STATEMENT, Source
from attnscale.plain import readable
from attnscale.rules.listing import Entry
from attnscale.show.tables import Column, Row, Table
from attnscale.show.terminal import print_table, say
from attnscale.show.text import number
from attnscale.theory import Prediction
from attnscale.theory.prediction import Candidate

TONES = {"healthy": "fine", "sharp": "error", "diluted": "warning"}
FORMULAS = {"unscaled": "none", "inverse_sqrt": "1/√d_k", "inverse_dim": "1/d_k", "calibrated": "calibrated"}
COLUMNS = (
    Column("scale", is_text=True),
    Column("multiplier"),
    Column("spread"),
    Column("entropy (nats)", "entropy\n(nats)", drop=1),
    Column("entropy (% of max)", "entropy\n(% of max)"),
    Column("top-1"),
    Column("1−Σp²"),
    Column("verdict", is_text=True),
)


def show_catalogue(entries: Sequence[Entry]) -> None:
    """Print every rule with its formula, its use and its source."""
    console = Console()
    grid = Grid("rule", "use it for", box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for entry in entries:
        rule = Group(Text(entry.call, style="bold"), Text(f"  {entry.formula}"))
        grid.add_row(rule, Group(Text(entry.use), Text(entry.source, style="dim")))
    console.print(grid)
    say(
        "Pass one as scale=… to attnscale.attention or attnscale.MultiheadAttention; a rule with one number can "
        "also be passed by name, as in scale='temperature:8'.",
        console,
    )


def show_prediction(prediction: Prediction, console: Console | None = None) -> None:
    """Print the predicted spreads, the candidate scales and the advice."""
    console, p = console or Console(), prediction
    start = f"d_model {p.d_model}, {p.heads} heads of d_k {p.head_dim}"
    say(f"{start}, weights by {p.initialisation}, {p.length:,} keys", console, "bold")
    say(
        f"q and k spread by {number(p.query_std)}, q·k by {number(p.score_std)}; "
        f"critical spread over {p.length:,} keys: {p.critical_spread:.3g}",
        console,
    )
    rows = tuple(_row(candidate) for candidate in p.candidates)
    print_table(Table(COLUMNS, (("", rows),)), console)
    console.print()
    say(p.advice, console)


def _row(candidate: Candidate) -> Row:
    softmax, spreads = candidate.softmax, (f"{candidate.scale:.4g}", number(candidate.spread))
    shares = (f"{100 * softmax.entropy_ratio:.1f}", f"{softmax.top1:.3f}", f"{softmax.jacobian_trace:.3f}")
    name = FORMULAS.get(candidate.name, candidate.name)
    return Row((name, *spreads, f"{softmax.entropy:.2f}", *shares, candidate.regime), tone=TONES[candidate.regime])


COLOURS = {"confirmed": "green", "qualified": "yellow", "refuted": "red"}
LARGE = 1e9  # larger floats are written with an exponent


def show_ledger(claims: Sequence[Claim]) -> None:
    """Print the claims of each source with their sections, then the counts; plain arithmetic is listed separately."""
    console = Console()
    for source in SOURCES:
        own = [claim for claim in claims if claim.source == source.name]
        if own:
            _print_title(source, console)
            for kind, heading in ((STATEMENT, ""), (ARITHMETIC, "Plain arithmetic:")):
                if group := [claim for claim in own if claim.kind == kind]:
                    console.print(*([heading] if heading else []), *map(_entry, group), sep="\n")
    console.print(Text("\n" + "\n".join(counted(claims)), style="bold"))


def _print_title(source: Source, console: Console) -> None:
    console.print(Text.assemble((source.title, "bold"), f", {source.kind} ({source.name})"))


def _entry(claim: Claim) -> Text:
    note = f"{claim.note} " if claim.note else ""
    sentence = f"{claim.claim} Claimed: {shown_value(claim.claimed)}. Computed: {shown_value(claim.computed)}. "
    section = (f"{note}[{claim.section}]", "dim")
    return Text.assemble((f"{claim.verdict} ", COLOURS[claim.verdict]), (f"{claim.id}: ", "cyan"), sentence, section)


def counted(claims: Sequence[Claim]) -> list[str]:
    """Return sentences that count the verdicts, with plain arithmetic counted separately."""
    sentences = []
    for kind, noun, rest in ((STATEMENT, "statement", ""), (ARITHMETIC, "number", " by plain arithmetic")):
        counts = Counter(claim.verdict for claim in claims if claim.kind == kind)
        found = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        nouns = noun if counts.total() == 1 else f"{noun}s"
        sentences += [f"{counts.total()} {nouns}{rest}: {found}."] if counts else []
    return sentences


def show_index() -> None:
    """Print every exercise, listing and worked example of each source with its command."""
    console = Console()
    for source in SOURCES:
        _print_title(source, console)
        for worked in INDEX:
            if worked.source == source.name:
                console.print(
                    Text.assemble((f"{worked.kind} ", "dim"), f"{worked.what}: ", (worked.command, "cyan")),
                    soft_wrap=True,
                )


def shown_value(value: object) -> str:
    """Return a claimed or computed value as text."""
    if isinstance(value, list):
        return f"[{', '.join(map(shown_value, value))}]"
    if isinstance(value, float) and abs(value) >= LARGE:
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


# Columns of timings, with their meanings.
COSTS = {
    "timed as": "'calls' from Python, or 'graph', a CUDA graph, which excludes the host's time",
    "ms": "milliseconds of one call",
    "× plain": "time relative to the fastest plain SDPA, timed in the same rounds; median over rounds",
    "quartiles": "first and third quartile of that ratio over rounds",
    "peak MB": "peak memory, without the inputs",
    "host µs": "time until a call returns, on an idle GPU",
}
ON_GPU = ("timed as", "peak MB", "host µs")
SHAPE = "(batch, heads, key heads, queries, keys, d_k)"


def show_costs(costs: Sequence[dict[str, Any]]) -> None:
    """Print the timings of each case and their ratios to plain SDPA, for calls from Python and for CUDA graphs."""
    console, is_on_gpu = Console(), any(cost["graph"] or cost["peak_bytes"] is not None for cost in costs)
    names = [name for name in COSTS if is_on_gpu or name not in ON_GPU]
    groups = []
    for title, group in groupby(costs, title_of):
        lines = (line for cost in group for line in _timings(cost))
        groups.append((title, tuple(Row((variant, *(cells[name] for name in names))) for variant, cells in lines)))
    columns = (Column("variant", is_text=True), *map(Column, names))
    print_table(Table(columns, tuple(groups)), console)
    console.print()
    for sentence in (f"Titles show {SHAPE}.", *(f"{name}: {COSTS[name]}" for name in names)):
        say(sentence, console, "dim")


def _timings(cost: dict[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a line for each way in which a variant was timed; the first has its name and its memory."""
    peak = "" if cost["peak_bytes"] is None else f"{cost['peak_bytes'] / 1e6:,.0f}"
    host = "" if cost["host_microseconds"] is None else f"{cost['host_microseconds']:.0f}"
    name = cost["variant"]
    for mode in ("graph", "calls"):
        if timing := cost[mode]:
            low, high = timing["quartiles"]
            cells = readable(timing["milliseconds"]), f"{timing['ratio']:.3f}", f"{low:.3f}–{high:.3f}"
            yield name, dict(zip(COSTS, (mode, *cells, peak, host), strict=True))
            name = peak = host = ""


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
