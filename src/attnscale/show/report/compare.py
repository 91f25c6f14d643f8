"""The report of `attnscale compare`."""

from attnscale.comparing import Comparison, HeadChange
from attnscale.comparing.moves import LEVEL
from attnscale.comparing.portrait import COMPARED
from attnscale.diagnose.finding import grouped
from attnscale.measure.statistics import STATISTICS
from attnscale.plain import finite
from attnscale.show.check import place
from attnscale.show.compare import by_factor
from attnscale.show.report.figures import Axis, Figure, Heat
from attnscale.show.report.names import ticks
from attnscale.show.report.parts import Note, Page, Row, Section, Table, render


def comparison_page(comparison: Comparison) -> str:
    """The page, as a string."""
    return render(comparison_report(comparison))


def comparison_report(comparison: Comparison) -> Page:
    """What `attnscale compare` found, as a report."""
    return Page(
        kind="attnscale compare",
        title=f"{comparison.before} → {comparison.after}",
        verdict=comparison.conclusion,
        tone="warning" if comparison.worse else "fine",
        notes=(*_findings(comparison), *map(_note, comparison.changed)),
        sections=(_heads(comparison), _method(comparison)),
    )


def _note(head: HeadChange) -> Note:
    told = f"{'; '.join(map(str, head.changed))}."
    return Note("warning" if head.worse else "note", "changed", told, "", head.place, by_factor(head))


def _findings(comparison: Comparison) -> tuple[Note, ...]:
    return tuple(
        Note(group.first.severity if word == "came" else "fine", word, group.first.message, group.first.code,
             place(group), group.first.advice if word == "came" else "")
        for word, findings in (("came", comparison.came), ("went", comparison.gone))
        for group in grouped(findings)
    )  # fmt: skip


def _heads(comparison: Comparison) -> Section:
    shown = [name for name in COMPARED if any(name in head.moves for head in comparison.heads)]
    layers = dict.fromkeys(head.layer for head in comparison.heads)
    groups = tuple(
        (layer, tuple(_row(head, shown) for head in comparison.heads if head.layer == layer)) for layer in layers
    )
    headings = ("head", *(STATISTICS[name].long for name in shown), "changed")
    drawn = ((_map(comparison),),) if comparison.heads else ()
    return Section("heads", "Head by head", (*drawn, Table(headings, groups, frozenset({0, len(headings) - 1}))))


def _map(comparison: Comparison) -> Figure:
    """How far every head moved, up or down, one statistic at a time."""
    names = tuple(dict.fromkeys(head.layer for head in comparison.heads))
    layers = [[head for head in comparison.heads if head.layer == name] for name in names]
    width = max(map(len, layers))
    views = {}
    for statistic in (name for name in COMPARED if any(name in head.moves for head in comparison.heads)):
        moves = [[head.moves.get(statistic) for head in layer] + [None] * (width - len(layer)) for layer in layers]
        sizes = [[None if move is None else move.size for move in row] for row in moves]
        long = STATISTICS[statistic].long
        views[long] = Heat(
            values=sizes,
            x=Axis("head"),
            y=Axis("layer", ticks=ticks(names)),
            unit=f"change of {long}",
            rows=names,
            low=0.0,
            high=max((size for row in sizes for size in row if size is not None), default=0.0) or 1.0,
            notice=_notice(long, [head for head in comparison.heads if statistic in head.moves], statistic),
            errors=[[None if move is None else finite(move.error) for move in row] for row in moves],
        )
    return Figure("change-map", views, choose="Colour heads by the change of")


def _notice(long: str, heads: list[HeadChange], statistic: str) -> str:
    most = max(heads, key=lambda head: head.moves[statistic].size)
    beyond = sum(head.moves[statistic].is_beyond for head in heads)
    return (
        f"Up or down, as a logarithm or of a share. The {long} moved most in head {most.head} of {most.layer}, "
        f"{most.moves[statistic].told}; in {beyond} of {len(heads)} heads it moved beyond its error."
    )


def _row(head: HeadChange, shown: list[str]) -> Row:
    cells = tuple(head.moves[name].told if name in head.moves else "–" for name in shown)
    verdict = "no" if not head.changed else "with its input" if head.carried else "itself"
    tone = "warning" if head.worse else "note" if head.changed else "fine"
    return Row((str(head.head), *cells, verdict), head.place, tone)


def _method(comparison: Comparison) -> Section:
    told = (
        "Every head was measured on several sequences, or in the latest records of a run; ± is the standard error of "
        "the change, from how much these differ. Where both were run on the same sequences, it is that of the "
        f"differences. A change is told where it is larger than {comparison.tolerance:g}, relative or of a share, and "
        f"beyond its error: so that among all heads and statistics together the chance to name any is {LEVEL:.0%} "
        "where nothing changed (Student, Welch, Holm). A head whose queries and keys are made by the same parameters "
        "as before, bit by bit, moved with what reaches it."
    )
    return Section("method", "How it was compared", (told, *comparison.notes))
