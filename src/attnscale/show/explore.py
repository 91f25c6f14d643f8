"""The page of `attnscale explore`: the scale, the spread and the softmax under one's fingers, in one file."""

from dataclasses import asdict, dataclass
from typing import Any

from markupsafe import Markup

from attnscale import __version__
from attnscale.claims.discussion import LOGITS
from attnscale.claims.textbook import FIVE
from attnscale.claims.worked_numbers import RAW
from attnscale.show.page import code, data, pages, policy, source
from attnscale.show.scales import tabulated_rules
from attnscale.theory.gaussian import FROZEN, UNIFORM_BELOW
from attnscale.theory.limits import DILUTED_SPREAD, FREEZING_MARGIN

# One concept a file, in the order in which they use each other.
SCRIPTS = (
    "numerics", "random", "settings", "scale", "view", "draw", "spread", "weights", "jacobian", "received", "along",
    "freezing", "own", "vectors", "proof", "controls",
)  # fmt: skip


@dataclass(frozen=True)
class Control:
    """A slider with its number: its name in the address, what it is, its range and where it starts."""

    name: str
    label: str
    low: float
    high: float
    start: float
    integer: bool = False


CONTROLS = (
    Control("d", "dₖ, the key dimension", 1, 1024, 64, integer=True),
    Control("n", "keys a row sees", 2, 2**20, 1024, integer=True),
    Control("q", "spread of q", 0.1, 10.0, 1.0),
    Control("k", "spread of k", 0.1, 10.0, 1.0),
    Control("t", "temperature, on top of the rule", 0.1, 10.0, 1.0),
)

# The scores that the articles work with, each at the d_k they give.
PRESETS = (
    ("tutorial", RAW, 64),
    ("tutorial", [50, 10, 5], 64),
    ("tutorial", [5, 1, 0.5], 64),
    ("textbook", FIVE, 64),
    ("forum", LOGITS, 64),
)


def explore_page() -> str:
    """The page, as a string: no request leaves it, and what an address asks of it is only ever text."""
    templates = pages()
    script = code("\n".join(["'use strict';", source(templates, *(f"explore/{name}.js" for name in SCRIPTS))]))
    return templates.get_template("explore/page.html.j2").render(
        controls=CONTROLS,
        presets=[{"name": name, "scores": _written(scores), "d": d} for name, scores, d in PRESETS],
        data=data(explore_data()),
        policy=policy(script),
        style=Markup(source(templates, "explore/page.css")),
        script=script,
        version=__version__,
    )


def explore_data() -> dict[str, Any]:
    """What the page takes from the library: the rules, the ranges, and where softmax changes its behaviour."""
    (d, n, q, k) = ((control.low, control.high) for control in CONTROLS[:4])
    return {
        "controls": [asdict(control) for control in CONTROLS],
        "rules": tabulated_rules(d, n, (q[0] * k[0], q[1] * k[1])),
        "limits": {
            "diluted": DILUTED_SPREAD,
            "margin": FREEZING_MARGIN,
            "frozen": FROZEN,
            "uniform": UNIFORM_BELOW,
        },
    }


def _written(scores: Any) -> str:
    return ", ".join(f"{float(score):g}" for score in scores)
