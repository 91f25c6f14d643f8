"""Scale rules: callables from query and key to query, key and a scale; one rule per file."""

from attnscale.rules.calibrated import calibrated
from attnscale.rules.catalogue import RULES, get_rule, rule_name
from attnscale.rules.constant import constant
from attnscale.rules.cosine import Cosine
from attnscale.rules.inverse_dim import inverse_dim
from attnscale.rules.inverse_sqrt import inverse_sqrt
from attnscale.rules.learned_temperature import LearnedTemperature
from attnscale.rules.log_length import log_length
from attnscale.rules.mup import mup
from attnscale.rules.qk_norm import QKNorm
from attnscale.rules.query_temperature import QueryTemperature
from attnscale.rules.rule import About, Rule, about, about_rule
from attnscale.rules.temperature import temperature
from attnscale.rules.unscaled import unscaled
from attnscale.rules.yarn import yarn

__all__ = [
    "RULES",
    "About",
    "Cosine",
    "LearnedTemperature",
    "QKNorm",
    "QueryTemperature",
    "Rule",
    "about",
    "about_rule",
    "calibrated",
    "constant",
    "get_rule",
    "inverse_dim",
    "inverse_sqrt",
    "log_length",
    "mup",
    "rule_name",
    "temperature",
    "unscaled",
    "yarn",
]
