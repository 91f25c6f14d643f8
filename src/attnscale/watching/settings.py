"""Settings: what a watcher is asked for; users set the first two."""

from dataclasses import dataclass

from attnscale.errors import SettingError

DEFAULT_ROWS = 64


@dataclass(frozen=True)
class Settings:
    """How a model is watched.

    `rows` are sampled per head and call, None looks at all of them; `keep` holds on to queries, keys, values and masks
    of all calls. With `training`, calls in evaluation mode without gradients are left out, and a plan is
    recorded for probes. With a `seed` the rows
    sampled depend on it and on the length of the queries alone, and each call is kept by itself: for ranks that share
    out keys.
    """

    rows: int | None = DEFAULT_ROWS
    keep: bool = False
    training: bool = False
    seed: int | None = None
    may_be_empty: bool = False  # a model that ran and showed no attention is a result, not an error

    def __post_init__(self) -> None:
        rows = self.rows
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise SettingError(f"Expected rows as a whole number of at least 1, or None for every row, got {rows!r}.")
