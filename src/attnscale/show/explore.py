"""The page of `attnscale explore`: scale, spread and softmax move with sliders, and a trained model runs, in one file.

The page knows no rule. A rule is asked here for its scale on tensors that have a shape and no memory. If it answers
with the tensors untouched and a positive number that is a product of factors of one setting each, these are tabulated;
a rule that learns, or normalises, is left out.
"""

import base64
import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import torch
from markupsafe import Markup
from torch import Tensor, nn

from attnscale import __version__
from attnscale.claims.discussion import LOGITS
from attnscale.claims.textbook import FIVE
from attnscale.claims.tutorial import RAW
from attnscale.errors import SettingError
from attnscale.lab.training import attentions_of
from attnscale.models import load_bundled
from attnscale.rules import RULES
from attnscale.rules.calibrated import calibrated
from attnscale.rules.rule import Rule, about_rule
from attnscale.show.page import code, data, environment, policy, source
from attnscale.theory import Initialisation, score_variance, unit_variance_scale
from attnscale.theory.gaussian import FROZEN, UNIFORM_BELOW
from attnscale.theory.limits import CRITICAL_MARGIN, DILUTED_SPREAD

Range: TypeAlias = tuple[float, float]
Scale: TypeAlias = Callable[[Mapping[str, float]], float]  # of d, n, spread (σ_q σ_k) and number

SCRIPTS = tuple(
    f"explore/{name}.js"
    for name in (
        "numerics", "settings", "view", "draw", "panels", "gradient", "proof", "model", "recorded", "story", "controls",
    )
)  # fmt: skip
RECORDED = "explore/recorded.json"  # made by `python scripts/record_results.py`
STEPS = ("what a score is", "why it spreads", "what softmax does", "what can be learned", "why √dₖ and not dₖ",
         "when it is not enough")  # fmt: skip
INITIALISATIONS = {
    "Xavier": ("xavier", 1),
    "GPT-2, N(0, 0.02²), width 768": ("normal:0.02", 1),
    "nn.Linear": ("torch", 1),
    "nn.MultiheadAttention, one Xavier matrix for q, k and v": ("xavier", 3),
}
WIDTH = 768
MOST_BYTES = 64  # of a sentence: more would be too small to read
STARTS = {"constant": 0.125, "temperature": 8.0, "yarn": 4.0, "mup": 64.0}  # where a rule's number has no default
REACH = 100.0  # a rule's number can be moved this many times up and down
EVERY = 24  # integers up to here are all in a table
RATIO = 1.06  # from one line of a table to the next; a cubic between them is good to 1e-9
POWER_LAW = 1e-12  # a table this close to a line, in logarithms, is that line
AGREES = 1e-7  # relative difference that is allowed between a rule and its table


@dataclass(frozen=True)
class Control:
    """A slider with its number: its name in the address, its label, its range and its start."""

    name: str
    label: str
    low: float
    high: float
    start: float
    integer: bool = False


CONTROLS = (
    Control("d", "dₖ, the key dimension", 1, 1024, 64, integer=True),
    Control("n", "n, keys a row sees", 2, 2**20, 16, integer=True),
    Control("q", "spread of q", 0.1, 10.0, 1.0),
    Control("k", "spread of k", 0.1, 10.0, 1.0),
)

# What the articles work with: the scores with the d_k they give, two vectors, and the proof for d_k = 3.
SCORES = (("tutorial", RAW), ("tutorial", [50, 10, 5]), ("tutorial", [5, 1, 0.5]), ("textbook", FIVE),
          ("discussion", LOGITS))  # fmt: skip
OTHER_EXAMPLES = (
    {"name": "tutorial", "what": "q = [1, 0, 1, 0], k = [0, 1, 1, 1]", "view": "query=1, 0, 1, 0&key=0, 1, 1, 1"},
    {"name": "tutorial", "what": "the nine terms of (q·k)² at dₖ = 3", "view": "dim=3&step=3"},
)


def presets() -> list[dict[str, str]]:
    """List the articles' examples, each with the settings that show it."""
    found = []
    for name, scores in SCORES:
        written = ", ".join(f"{float(score):g}" for score in scores)
        found.append({"name": name, "what": f"scores {written}", "scores": written, "view": f"scores={written}&d=64"})
    return [*found, *({**example, "scores": ""} for example in OTHER_EXAMPLES)]


def explore_page() -> str:
    """Return the page as a string: no request leaves it, and what an address asks of it is only ever text."""
    templates = environment()
    script = code("\n".join(["'use strict';", source(templates, *SCRIPTS)]))
    shape, weights = _model()
    recorded = json.loads(source(templates, RECORDED))
    return templates.get_template("explore/page.html.j2").render(
        controls=CONTROLS,
        presets=presets(),
        steps=STEPS,
        initialisations=_initialisations(),
        most_bytes=MOST_BYTES,
        recorded=recorded,
        data=data({**explore_data(), "model": shape, "recorded": recorded}),
        weights=weights,
        policy=policy(script),
        style=Markup(source(templates, "explore/page.css")),
        script=script,
        version=__version__,
    )


def explore_data() -> dict[str, Any]:
    """Return what the page takes from the library: rules, ranges, and where softmax changes its behaviour."""
    (d, n, q, k) = ((control.low, control.high) for control in CONTROLS)
    limits = {"diluted": DILUTED_SPREAD, "margin": CRITICAL_MARGIN, "frozen": FROZEN, "uniform": UNIFORM_BELOW}
    rules = tabulated_rules({"d": d, "n": n, "spread": (q[0] * k[0], q[1] * k[1])})
    return {"controls": [asdict(control) for control in CONTROLS], "rules": rules, "limits": limits}


def _model() -> tuple[dict[str, Any], Markup]:
    """Return the shape of the bundled model with the order of its tensors, and its float16 weights in base64."""
    model, _ = load_bundled()
    tensors = {name: tensor.half() for name, tensor in model.state_dict().items()}
    attention = attentions_of(model)[0]
    shape = {
        "vocabulary": model.head.out_features, "d_model": model.head.in_features, "layers": len(model.blocks),
        "heads": attention.heads, "head_dim": attention.head_dim,
    }  # fmt: skip
    sizes = [[name, tensor.numel()] for name, tensor in tensors.items()]
    written = b"".join(tensor.numpy().astype("<f2").tobytes() for tensor in tensors.values())
    return {"shape": shape, "tensors": sizes, "most_bytes": MOST_BYTES}, Markup(base64.b64encode(written).decode())


def _initialisations() -> list[dict[str, Any]]:
    """List the spread that the components of q and k start with, for normalised inputs."""
    found = []
    for name, (initialisation, parts) in INITIALISATIONS.items():
        variance = Initialisation.parse(initialisation).projected_variance(WIDTH, parts * WIDTH)
        found.append({"name": name, "std": math.sqrt(variance)})
    return found


class NotTabulatedError(Exception):
    """The scale of a rule is no product of factors."""


def tabulated_rules(ranges: dict[str, Range]) -> list[dict[str, Any]]:
    """Return every rule that can be tabulated over these ranges of `d`, `n` and `spread`, as JSON takes it."""
    rules = []
    for name, rule in RULES.items():
        try:
            rules.append(_tabulated(name, rule, ranges))
        except NotTabulatedError:
            continue
    return rules


def _tabulated(name: str, rule: Rule | type, ranges: dict[str, Range]) -> dict[str, Any]:
    about, number = about_rule(rule), _number(name, rule)
    assert about is not None
    if number is not None:
        ranges = ranges | {"number": (number.low, number.high)}
    scale = _scale(rule, has_number=number is not None)
    usual = {"d": 64.0, "n": 1024.0, "spread": 1.0, "number": number.start if number else 1.0}
    log_usual = math.log(scale(usual))
    factors = []
    for setting, (low, high) in ranges.items():
        lines = _lines(low, high, is_integer=setting in "dn")
        logs = [math.log(scale(usual | {setting: line})) - log_usual for line in lines]
        if any(logs):
            factors.append({"of": setting, **_shortened([math.log(line) for line in lines], logs)})
    _require_product(scale, usual, ranges)
    return {
        "name": name,
        "formula": about.formula,
        "use": about.use,
        "source": about.source,
        "parameter": number and asdict(number),
        "log_scale": log_usual,
        "factors": factors,
    }


def _number(name: str, rule: Rule | type) -> Control | None:
    """Return the rule's own number as a control."""
    make: Any = rule if isinstance(rule, type) else type(rule)
    first = next((field.name for field in fields(make)), None) if is_dataclass(make) else None
    if first is None:
        return None
    start = STARTS.get(name, 1.0) if isinstance(rule, type) else getattr(rule, first)
    if not (isinstance(start, int | float) and _accepts(make, start)):
        raise NotTabulatedError
    low = next((low for low in (start / REACH, 1.0) if _accepts(make, low)), start)
    return Control(first, first, float(low), float(start) * REACH, float(start))


def _accepts(make: Callable[[float], Rule], number: float) -> bool:
    try:
        make(number)
    except (SettingError, TypeError):
        return False
    return True


def _scale(rule: Rule | type, *, has_number: bool) -> Scale:
    """Return the rule's scale as a function of the settings."""
    if rule is calibrated:  # it measures what the settings say
        return lambda at: unit_variance_scale(score_variance(round(at["d"]), 0.0, at["spread"] ** 2))
    make: Any = rule if isinstance(rule, type) else type(rule)

    def scale(at: Mapping[str, float]) -> float:
        called: Any = make(at["number"]) if has_number else rule
        query, key = (torch.empty(round(size), round(at["d"]), device="meta") for size in (1, at["n"]))
        if isinstance(called, type | nn.Module):
            raise NotTabulatedError
        try:
            same_query, same_key, value = called(query, key)
        except RuntimeError:  # it looked at values, and there are none
            raise NotTabulatedError from None
        if same_query is not query or same_key is not key or isinstance(value, Tensor) or not 0 < value < math.inf:
            raise NotTabulatedError
        return float(value)

    return scale


def _lines(low: float, high: float, *, is_integer: bool) -> list[float]:
    """Return where to tabulate: in equal ratios, and at every small integer."""
    small = list(range(int(low), EVERY)) if is_integer else []
    low = max(low, EVERY) if is_integer else low
    count = math.ceil(math.log(high / low) / math.log(RATIO))
    points = [low * (high / low) ** (i / count) for i in range(count + 1)]
    return [*small, *(dict.fromkeys(map(round, points)) if is_integer else points)]


def _shortened(at: list[float], logs: list[float]) -> dict[str, list[float]]:
    """Return the table, or its two ends where it is a power law."""
    slope = (logs[-1] - logs[0]) / (at[-1] - at[0])
    is_straight = all(abs(logs[0] + slope * (x - at[0]) - y) < POWER_LAW for x, y in zip(at, logs, strict=True))
    return {"at": [at[0], at[-1]], "log": [logs[0], logs[-1]]} if is_straight else {"at": at, "log": logs}


def _require_product(scale: Scale, usual: Mapping[str, float], ranges: Mapping[str, Range]) -> None:
    """Refuse a scale that is not the product of what each setting does alone, at the corners and in between."""
    rounded = {name: round if name in "dn" else float for name in ranges}
    values = ((low, rounded[name](math.sqrt(low * high)), high) for name, (low, high) in ranges.items())
    for corner in itertools.product(*values):
        at = dict(zip(ranges, corner, strict=True))
        product = scale(usual) * math.prod(scale({**usual, name: x}) / scale(usual) for name, x in at.items())
        if not math.isclose(scale({**usual, **at}), product, rel_tol=AGREES):
            raise NotTabulatedError
