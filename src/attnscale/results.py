"""Base classes of results: a table in a notebook, one line as repr(), a data frame, a plot.

`attnscale.show.notebook` defines the view of each result type. It is imported on first use.
"""

from importlib import import_module
from typing import Any

from attnscale.plain import printable

HOME = "attnscale.show.notebook:view_of"


def _view(result: object) -> Any:
    module, _, name = HOME.partition(":")
    return getattr(import_module(module), name)(result)


class Result:
    """Base of results, with a table for notebooks and a repr() of one line."""

    def __repr__(self) -> str:
        verdict = printable(_view(self).verdict.rstrip("."))
        return f"<{type(self).__name__}: {verdict}>"

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
