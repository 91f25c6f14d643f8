"""A plot or heat map of a lab result as SVG: drawn once, when the documentation is built."""

import math
from html import escape
from typing import Any

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 46
# Okabe and Ito's, told apart by colour-blind readers; dashes tell them apart in print.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d00", "#777777")
DASHES = ("", "7 3", "2 3", "9 3 2 3")
LEGEND_LINE = 17
Point = tuple[float, float]


class Axis:
    """Values along one side, linear or logarithmic."""

    def __init__(self, values: list[float], start: float, end: float, log: bool) -> None:
        usable = [value for value in values if math.isfinite(value) and (not log or value > 0)] or [1.0]
        self.log, self.start, self.end = log, start, end
        self.low, self.high = self._raw(min(usable)), self._raw(max(usable))
        if self.high - self.low < 1e-12:
            self.low, self.high = self.low - 0.5, self.high + 0.5

    def _raw(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def at(self, value: float) -> float:
        """Where a value lies, in pixels."""
        share = (self._raw(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def shows(self, value: float | None) -> bool:
        """Whether a value has a place on it."""
        return value is not None and math.isfinite(value) and (not self.log or value > 0)

    def ticks(self) -> list[float]:
        """About five round values; powers of ten, or their halves and fifths, on a logarithmic axis."""
        if self.log:
            powers = range(math.floor(self.low), math.ceil(self.high) + 1)
            factors = (1,) if self.high - self.low > 2.5 else (1, 2, 5)
            marks = [factor * 10.0**power for power in powers for factor in factors]
            marks = marks[:: max(1, len(marks) // 7)] if factors == (1,) else marks
        else:
            rough = (self.high - self.low) / 5
            unit = 10.0 ** math.floor(math.log10(rough))
            step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
            first = math.ceil(self.low / step)
            marks = [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [mark for mark in marks if self.low - 1e-9 <= self._raw(mark) <= self.high + 1e-9]


def chart(plot: dict[str, Any]) -> str:
    """The SVG of a plot, or of a heat map."""
    drawn, height = _heatmap(plot) if plot["kind"] == "heatmap" else _curves(plot)
    label = escape(f"{plot['title']}: {plot['notice']}", quote=True)
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{label}">{drawn}</svg>'


def _curves(plot: dict[str, Any]) -> tuple[str, float]:
    curves = plot["curves"]
    xs = [float(x) for curve in curves for x in curve["x"]]
    bands = [curve.get(name) or () for curve in curves for name in ("y", "low", "high")]
    ys = [float(y) for band in bands for y in band if y is not None]
    across = Axis(xs, LEFT, WIDTH - RIGHT, bool(plot.get("log_x")))
    up = Axis(ys, HEIGHT - BOTTOM, TOP, bool(plot.get("log_y")))
    parts = [_frame(plot, across, up)]
    for index, curve in enumerate(curves):
        colour, dash = (
            COLOURS[index % len(COLOURS)],
            "3 3" if curve.get("is_theory") else DASHES[index // len(COLOURS) % 4],
        )
        parts += [_band(curve, across, up, colour), _line(curve, across, up, colour, dash)]
        y = HEIGHT + LEGEND_LINE * index
        name = escape(curve["name"] + (" (theory)" if curve.get("is_theory") else ""))
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + 26}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{dash}"/><text x="{LEFT + 34}" y="{y}">{name}</text>'
        )
    return "".join(parts), HEIGHT + LEGEND_LINE * len(curves)


def _frame(plot: dict[str, Any], across: Axis, up: Axis) -> str:
    parts = []
    for tick in across.ticks():
        x = across.at(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{up.end}" y2="{up.start}"/>')
        parts.append(f'<text x="{x:.1f}" y="{up.start + 15}" text-anchor="middle">{tick:.4g}</text>')
    for tick in up.ticks():
        y = up.at(tick)
        parts.append(f'<line class="grid" x1="{across.start}" x2="{across.end}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{across.start - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    parts.append(f'<line class="axis" x1="{across.start}" x2="{across.end}" y1="{up.start}" y2="{up.start}"/>')
    parts.append(f'<line class="axis" x1="{across.start}" x2="{across.start}" y1="{up.start}" y2="{up.end}"/>')
    return "".join(parts) + _labels(plot, up.start + 34)


def _labels(plot: dict[str, Any], below: float) -> str:
    middle = (TOP + below) / 2
    return (
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{below:g}" text-anchor="middle">{escape(plot["x_label"])}</text>'
        f'<text transform="rotate(-90)" x="{-middle:g}" y="12" text-anchor="middle">{escape(plot["y_label"])}</text>'
    )


def _line(curve: dict[str, Any], across: Axis, up: Axis, colour: str, dash: str) -> str:
    runs: list[list[Point]] = [[]]
    for x, y in zip(curve["x"], curve["y"], strict=True):
        if across.shows(x) and up.shows(y):
            runs[-1].append((across.at(x), up.at(y)))
        elif runs[-1]:
            runs.append([])
    lines = (
        f'<polyline fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}" points="{_points(run)}"/>'
        if len(run) > 1
        else f'<circle cx="{run[0][0]:.1f}" cy="{run[0][1]:.1f}" r="3" fill="{colour}"/>'
        for run in runs
        if run
    )
    return "".join(lines)


def _band(curve: dict[str, Any], across: Axis, up: Axis, colour: str) -> str:
    if not curve.get("low") or not curve.get("high"):
        return ""
    rows = [
        (x, low, high)
        for x, low, high in zip(curve["x"], curve["low"], curve["high"], strict=True)
        if across.shows(x) and up.shows(low) and up.shows(high)
    ]
    there = [(across.at(x), up.at(high)) for x, _, high in rows]
    back = [(across.at(x), up.at(low)) for x, low, _ in reversed(rows)]
    return f'<polygon fill="{colour}" fill-opacity="0.15" points="{_points(there + back)}"/>'


def _points(points: list[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _heatmap(plot: dict[str, Any]) -> tuple[str, float]:
    columns, rows, values = plot["columns"], plot["rows"], plot["values"]
    known = [value for row in values for value in row if value is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    width = (WIDTH - LEFT - RIGHT) / max(1, len(columns))
    height = min(30.0, 300 / max(1, len(rows)))
    below = TOP + height * len(rows)
    parts = []
    for i, row in enumerate(values):
        y = TOP + i * height
        parts.append(f'<text x="{LEFT - 6}" y="{y + height / 2 + 4:.1f}" text-anchor="end">{_short(rows[i])}</text>')
        for j, value in enumerate(row):
            share = 0.0 if value is None or high == low else (value - low) / (high - low)
            colour = "#9994" if value is None else _cividis(share)
            ink = "#fff" if share < 0.55 else "#000"
            parts.append(
                f'<rect x="{LEFT + j * width:.1f}" y="{y:.1f}" width="{width - 1:.1f}" height="{height - 1:.1f}" '
                f'fill="{colour}"/>'
            )
            if width > 34 and height > 12 and value is not None:
                x = LEFT + (j + 0.5) * width
                parts.append(
                    f'<text x="{x:.1f}" y="{y + height / 2 + 4:.1f}" text-anchor="middle" style="fill:{ink}">'
                    f"{value:.3g}</text>"
                )
    every = max(1, math.ceil(40 / width))
    parts += [
        f'<text x="{LEFT + (j + 0.5) * width:.1f}" y="{below + 15:.1f}" text-anchor="middle">{_short(column)}</text>'
        for j, column in enumerate(columns)
        if j % every == 0
    ]
    return "".join(parts) + _labels(plot, below + 34), below + 42


def _short(value: object) -> str:
    return escape(f"{value:.4g}" if isinstance(value, float) else str(value))


def _cividis(share: float) -> str:
    """From dark blue through grey to yellow: even in lightness, and the same to colour-blind readers."""
    stops = ((0, 34, 78), (87, 93, 109), (165, 156, 116), (254, 232, 56))
    place = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    index = min(int(place), len(stops) - 2)
    left, right, between = stops[index], stops[index + 1], place - index
    return "#" + "".join(f"{round(a + (b - a) * between):02x}" for a, b in zip(left, right, strict=True))
