"""The report of `attnscale check`: one HTML page that fetches nothing and in which every name is data."""

import html
import math
from typing import Any

import torch
from markupsafe import Markup
from torch import Tensor

from attnscale import __version__
from attnscale.checking import Checked
from attnscale.diagnose.what_if import COLUMNS
from attnscale.show.check import HEADINGS, cells, place
from attnscale.show.naming import by_pattern
from attnscale.show.page import code, data, pages, policy, source

LABEL = 24  # characters of a name beside the map; hovering shows all of it
MATTER = 3  # findings shown before the fold
# What can be shown of a head: its statistic, the range of colours (None: that of the values), and the colours.
METRICS = {
    "spread of the scores": ("std", 0.0, None, "Viridis"),
    "entropy of ln n": ("entropy_ratio", 0.0, 1.0, "Viridis"),
    "gradient gain": ("gradient_gain", 0.0, 1.0, "Viridis"),
    "top-1 weight": ("top1", 0.0, 1.0, "Viridis"),
}


def report_page(checked: Checked) -> str:
    """The page, as a string; scripts run by their hash only, so nothing that a name smuggles in ever would."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    templates = pages()
    plotly, script = code(get_plotlyjs()), code(source(templates, "report.js"))
    by_name = {line.name: line for line in checked.lines}
    return templates.get_template("report.html.j2").render(
        checked=checked,
        shown=MATTER,
        headings=[_unfolded(heading) for heading in HEADINGS],
        layers=[(title, [(index, by_name[name]) for index, name in members]) for title, members in by_pattern(by_name)],
        cells=cells,
        place=place,
        columns=list(COLUMNS),
        metrics=list(METRICS),
        figure=data(head_map(checked)),
        policy=policy(plotly, script),
        style=Markup(source(templates, "report.css")),
        plotly=plotly,
        script=script,
        version=__version__,
        torch_version=torch.__version__,
    )


def head_map(checked: Checked) -> dict[str, Any]:
    """Layers × heads for each metric; None where a head has no value, or a layer fewer heads than others."""
    layers = list(checked.audit.layers.values())
    width = max(layer.heads for layer in layers)
    metrics = {}
    for name, (statistic, low, high, colours) in METRICS.items():
        values = [_padded(getattr(layer.stats, statistic), width) for layer in layers]
        metrics[name] = {"values": values, "from": low, "to": high or _largest(values), "colours": colours}
    numbered = {name: index for _, members in by_pattern(checked.audit.layers) for index, name in members}
    unique = len(set(numbered.values())) == len(numbered)
    labels = [_short((unique and numbered[layer.name]) or layer.name) for layer in layers]
    # plotly reads tags in what it shows: escape what is a name
    hover = [[html.escape(layer.name)] * width for layer in layers]
    return {"rows": list(map(html.escape, labels)), "hover": hover, "metrics": metrics}


def _unfolded(heading: str) -> str:
    """A heading of the terminal's table without its line breaks and abbreviations; top-1 does not break at all."""
    return (
        heading.replace("-\n", "")
        .replace("grad.", "gradient")
        .replace("\n", " ")
        .replace("-", "\N{NON-BREAKING HYPHEN}")
    )


def _short(name: str) -> str:
    return name if len(name) <= LABEL else f"…{name[1 - LABEL :]}"


def _padded(values: Tensor, width: int) -> list[float | None]:
    numbers = [value if math.isfinite(value) else None for value in values.double().tolist()]
    return numbers + [None] * (width - len(numbers))


def _largest(values: list[list[float | None]]) -> float:
    return max((value for row in values for value in row if value is not None), default=1.0) or 1.0
