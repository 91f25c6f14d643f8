"""Results that people look at: a table in a notebook, one line as repr(), a data frame, a plot.

`attnscale.show.notebook` knows what each kind of result shows. It is imported when it is first needed.
"""

from importlib import import_module
from typing import Any

HOME = "attnscale.show.notebook:View"


def _view(result: object) -> Any:
    module, _, name = HOME.partition(":")
    return getattr(import_module(module), name).of(result)


class Result:
    """Base of results: a notebook shows a table, repr() is one line."""

    def __repr__(self) -> str:
        return str(_view(self).line)

    def _repr_html_(self) -> str:
        return str(_view(self).html())

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame; its columns have the names of the glossary."""
        return _view(self).frame()


class PlottedResult(Result):
    """Base of results that can be drawn."""

    def plot(self, statistic: str = "spread", ax: Any = None) -> Any:
        """Draw a statistic by layer, or over the steps of a log; return the matplotlib axes."""
        return _view(self).plot(statistic, ax)
