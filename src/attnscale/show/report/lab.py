"""Report of an experiment of the lab."""

import re
from dataclasses import replace

from attnscale.lab import experiment as lab
from attnscale.show.page import Axis, Chart, Figure, Heat, Note, Page, Section, Series, render
from attnscale.show.tables import lab_table
from attnscale.show.text import shown

SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def lab_page(result: lab.Result) -> str:
    """Return the report of an experiment as a string."""
    return render(lab_report(result))


def lab_report(result: lab.Result) -> Page:
    """Return the report of an experiment as a Page; failed checks come first."""
    checks = sorted(result.checks, key=lambda check: bool(check.holds))
    figures = [_figure(f"plot-{index}", plot) for index, plot in enumerate(result.plots)]
    maps = [
        replace(figure, caption=plot.title) for figure, plot in zip(figures, result.plots, strict=True) if _is_map(plot)
    ]
    sections = [
        Section(f"figure-{index}", plot.title, ((figures[index],),))
        for index, plot in enumerate(result.plots)
        if not _is_map(plot)
    ]
    sections += [Section("maps", "Side by side", (tuple(maps),))] if maps else []
    sections += [
        Section(f"table-{index}", table.title, (lab_table(table),)) for index, table in enumerate(result.tables)
    ]
    if result.settings:
        settings = {name: shown(value) for name, value in result.settings.items()}
        sections.append(Section("method", "How it was measured", (settings,)))
    verdict, *more = SENTENCE_ENDS.split(result.conclusion, maxsplit=1)
    return Page(
        kind=f"attnscale lab {result.experiment}",
        title=result.question,
        verdict=verdict,
        lead=tuple(more),
        tone="fine" if all(check.holds is not False for check in checks) else "warning",
        notes=tuple(map(_note, checks)),
        notes_title="Checks",
        sections=tuple(sections),
    )


def _is_map(plot: lab.Plot | lab.Heatmap) -> bool:
    return isinstance(plot, lab.Heatmap)


def _note(check: lab.Check) -> Note:
    tone, tag = {True: ("fine", "pass"), False: ("warning", "fail"), None: ("note", "undecided")}[check.holds]
    return Note(tone, tag, check.evidence, place=check.statement)


def _figure(name: str, plot: lab.Plot | lab.Heatmap) -> Figure:
    return Figure(name, {plot.title: _heat(plot) if isinstance(plot, lab.Heatmap) else _chart(plot)})


def _chart(plot: lab.Plot) -> Chart:
    measured = [curve.name for curve in plot.curves if not curve.is_theory]
    series = tuple(
        Series(
            curve.name,
            curve.x,
            curve.y,
            curve.low or (),
            curve.high or (),
            marks=not curve.is_theory,
            # a prediction has the colour of its measured curve
            tone=measured.index(name) if (name := curve.name.removesuffix(", expected")) in measured else "ink",
            dashed=curve.is_theory,
        )
        for curve in plot.curves
    )
    return Chart(series, Axis(plot.x_label, plot.log_x), Axis(plot.y_label, plot.log_y), plot.notice)


def _heat(plot: lab.Heatmap) -> Heat:
    known = [value for row in plot.values for value in row if value is not None]
    rows, columns = (tuple(map(shown, names)) for names in (plot.rows, plot.columns))
    return Heat(
        values=plot.values,
        x=Axis(plot.x_label, ticks=columns),
        y=Axis(plot.y_label, ticks=rows),
        unit=plot.title,
        rows=tuple(f"{plot.y_label} {row}" for row in rows),
        columns=columns,
        column=plot.x_label,
        low=min(known, default=0.0) if plot.low is None else plot.low,
        high=max(known, default=1.0) if plot.high is None else plot.high,
        notice=plot.notice,
    )
