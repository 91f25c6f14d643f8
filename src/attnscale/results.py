"""Base classes of results: a table in a notebook, one line as repr(), a data frame, a plot.

`attnscale.show.notebook` defines the view of each result type. It is imported on first use.
"""

from importlib import import_module
from typing import Any

HOME = "attnscale.show.notebook"


def _view(result: object) -> Any:
    return import_module(HOME).view_of(result)


class Result:
    """Base of results, with a table for notebooks and a repr() of one line."""

    def __repr__(self) -> str:
        return str(_view(self).line)

    def _repr_html_(self) -> str:
        return str(_view(self).html())

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame; its columns have the names of the glossary."""
        return _view(self).frame()


class PlottedResult(Result):
    """Base of results with a plot."""

    def plot(self, statistic: str = "spread", ax: Any = None) -> Any:
        """Plot a statistic by layer, or over the steps of a log; return the matplotlib axes."""
        return _view(self).plot(statistic, ax)
