"""The catalogue of rules, and get_rule, which finds one by name."""

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass

from torch import nn

from attnscale.errors import SettingError, UnknownRuleError
from attnscale.rules.calibrated import calibrated
from attnscale.rules.constant import constant
from attnscale.rules.cosine import Cosine
from attnscale.rules.inverse_dim import inverse_dim
from attnscale.rules.inverse_sqrt import inverse_sqrt
from attnscale.rules.learned_temperature import LearnedTemperature
from attnscale.rules.log_length import log_length
from attnscale.rules.mup import mup
from attnscale.rules.qk_norm import QKNorm
from attnscale.rules.query_temperature import QueryTemperature
from attnscale.rules.rule import Rule
from attnscale.rules.temperature import temperature
from attnscale.rules.unscaled import unscaled
from attnscale.rules.yarn import yarn

# A rule, or its class if it has parameters without a default.
RULES: dict[str, Rule | type[Rule] | type[nn.Module]] = {
    "inverse_sqrt": inverse_sqrt,
    "inverse_dim": inverse_dim,
    "mup": mup(),
    "unscaled": unscaled,
    "constant": constant,
    "temperature": temperature,
    "calibrated": calibrated,
    "log_length": log_length(),
    "yarn": yarn,
    "LearnedTemperature": LearnedTemperature,
    "QueryTemperature": QueryTemperature,
    "QKNorm": QKNorm,
    "Cosine": Cosine,
}


def get_rule(rule: str | Rule | type, *, head_dim: int | None = None, heads: int | None = None) -> Rule:
    """Return the rule of that name, or the rule itself.

    A parameter may follow the name, as in `temperature:8`. Learned rules are made for `heads` and `head_dim`.

    >>> get_rule("yarn:4")
    yarn(factor=4.0)
    """
    if isinstance(rule, str):
        name, _, argument = rule.partition(":")
        name = _full_name(name)
        rule = RULES[name]
        if argument:
            return _with_argument(name, rule, argument)
    if isinstance(rule, type):
        return _with_sizes(rule, {"head_dim": head_dim, "heads": heads})
    if not callable(rule):
        raise SettingError(
            "Expected a scale as a number, a tensor, a rule or a rule's name, "
            f"got {rule!r} of type {type(rule).__name__}."
        )
    return rule


def rule_name(rule: Rule) -> str:
    """Return a rule's name, with its parameters if it has any."""
    return getattr(rule, "__name__", None) or repr(rule)


def _full_name(name: str) -> str:
    if name in RULES:
        return name
    folded = {_fold(known): known for known in RULES}
    if _fold(name) not in folded:
        raise UnknownRuleError(
            f"Unknown rule {name!r}. Expected one of: {', '.join(sorted(RULES, key=str.lower))}. "
            "Run 'attnscale rules' to see them."
        )
    return folded[_fold(name)]


def _fold(name: str) -> str:
    """Treat `qk-norm`, `QKNorm` and `qk_norm` as one name."""
    return name.strip().lower().replace("_", "").replace("-", "")


def _with_argument(name: str, rule: Rule | type, argument: str) -> Rule:
    make: Callable[[float], Rule] = rule if isinstance(rule, type) else type(rule)
    if not is_dataclass(make):
        raise SettingError(f"The rule {name!r} takes no number, got {argument!r} after the colon.")
    try:
        number = float(argument)
    except ValueError:
        raise SettingError(f"Expected a number after the colon of '{name}:{argument}'.") from None
    return make(number)


def _with_sizes(make: type[Rule], sizes: dict[str, int | None]) -> Rule:
    parameters = inspect.signature(make).parameters
    arguments = {name: size for name, size in sizes.items() if name in parameters and size is not None}
    missing = [name for name, value in parameters.items() if value.default is value.empty and name not in arguments]
    if missing:
        call = f"{make.__name__}({', '.join(f'{name}=…' for name in missing)})"
        raise SettingError(
            f"The rule {make.__name__!r} needs {', '.join(missing)}: make {call} once and pass it as the scale."
        )
    return make(**arguments)
