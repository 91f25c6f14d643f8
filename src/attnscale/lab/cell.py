"""Cell: one seeded run of an experiment, named by the content of its configuration."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Setting = str | float | int | bool | None
Settings = Mapping[str, Setting]
Outcome = dict[str, Any]  # plain values, as JSON takes them


@dataclass(frozen=True)
class Cell:
    """What is run: an experiment, the version of what it computes, and every setting, the seed among them.

    >>> cell = Cell("variance", 1, {"head_dim": 8, "seed": 0})
    >>> cell.digest == Cell("variance", 1, {"seed": 0, "head_dim": 8}).digest
    True
    """

    experiment: str
    version: int
    settings: Settings

    @property
    def digest(self) -> str:
        """The name of the configuration: equal exactly where all of it is equal."""
        return digest_of({"experiment": self.experiment, "version": self.version, "settings": dict(self.settings)})

    def __str__(self) -> str:
        return f"{self.experiment} ({', '.join(f'{name}={value}' for name, value in self.settings.items())})"


def digest_of(value: object) -> str:
    """A short hash of a plain value, whatever the order of its keys."""
    return hashlib.sha256(canonical(value).encode("utf-8")).hexdigest()[:32]


def canonical(value: object) -> str:
    """The one way to write a plain value as JSON; NaN and infinity as Python writes them."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
