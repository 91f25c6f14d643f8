"""The catalogue as a list of entries to show."""

import inspect
from dataclasses import asdict, dataclass, is_dataclass

from torch import nn

from attnscale.rules.catalogue import RULES
from attnscale.rules.rule import Rule, about_rule


@dataclass(frozen=True)
class Entry:
    """A rule of the catalogue: its call, formula, source and use."""

    name: str
    call: str
    formula: str
    source: str
    use: str
    learned: bool

    def to_dict(self) -> dict[str, str | bool]:
        """Return plain values for JSON."""
        return asdict(self)


def catalogue() -> list[Entry]:
    """List every rule, in the order of RULES."""
    return [_entry(name, rule) for name, rule in RULES.items()]


def _entry(name: str, rule: Rule | type) -> Entry:
    about = about_rule(rule)
    assert about is not None, f"the rule {name!r} has no @about"
    make = rule if isinstance(rule, type) else type(rule)
    parametrised = isinstance(rule, type) or is_dataclass(make)
    call = f"{name}{_short_signature(make)}" if parametrised else name
    return Entry(name, call, about.formula, about.source, about.use, learned=issubclass(make, nn.Module))


def _short_signature(make: type) -> str:
    parameters = inspect.signature(make).parameters.values()
    return f"({', '.join(str(p.replace(annotation=p.empty)) for p in parameters if p.kind is not p.KEYWORD_ONLY)})"
