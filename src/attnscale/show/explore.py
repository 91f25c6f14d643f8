"""Page of `attnscale explore`: sliders for scale, spread and keys, and a trained model that runs in the browser."""

import base64
import json
import math
import shlex
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import unquote

from markupsafe import Markup

from attnscale import __version__
from attnscale.claims import INDEX
from attnscale.errors import SettingError
from attnscale.lab.training import attentions_of
from attnscale.models import load_bundled
from attnscale.rules.listing import catalogue
from attnscale.show.page import fill, read_templates
from attnscale.theory import Initialisation
from attnscale.theory.gaussian import FROZEN, UNIFORM_BELOW
from attnscale.theory.limits import CRITICAL_MARGIN, DILUTED_SPREAD

SCRIPTS = (
    "draw.js",
    "explore/numerics.js",
    "explore/settings.js",
    "explore/panels.js",
    "explore/gradient.js",
    "explore/model.js",
    "explore/controls.js",
)
STYLES = ("base.css", "explore/page.css")
RECORDED = "explore/recorded.json"  # made by `python scripts/record_results.py`
# rules for the third column; settings.js implements each
THIRD = ("inverse_dim", "mup", "temperature", "log_length", "yarn", "calibrated")
STEPS = (
    "what a score is",
    "why it spreads",
    "what softmax does",
    "what can be learned",
    "why √dₖ and not dₖ",
    "when it is not enough",
)
INITIALISATIONS = {
    "Xavier": ("xavier", 1),
    "GPT-2, N(0, 0.02²), width 768": ("normal:0.02", 1),
    "nn.Linear": ("torch", 1),
    "nn.MultiheadAttention, one Xavier matrix for q, k and v": ("xavier", 3),
}
WIDTH = 768
MOST_BYTES = 64  # of the sentence; the letters of longer ones would be too small to read


@dataclass(frozen=True)
class Control:
    """A slider with its number field: its name in the address, its label, its range and its initial value."""

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
    Control("temperature", "τ, for the rule temperature", 0.1, 1000.0, 8.0),
)
OTHERS = (  # numbers in the address without a slider at the top of the page
    Control("dim", "dₖ in the proof", 1, 8, 3, integer=True),
    Control("step", "step of the proof", 1, 7, 1, integer=True),
    Control("seed", "seed", 1, 9999, 1, integer=True),
    Control("third", "third column", 0, 1, 0, integer=True),
)
TEXTS = ("scores", "query", "key", "sentence")


def presets() -> list[dict[str, str]]:
    """List the articles' examples that this page can show, each with its scores if it has any."""
    found = []
    for worked in INDEX:
        if "--view" in worked.command:
            view = shlex.split(worked.command)[-1]
            scores = dict(part.split("=") for part in view.split("&")).get("scores", "")
            found.append({"name": worked.source, "what": worked.what, "scores": scores, "view": view})
    return found


def require_view(view: str) -> None:
    """Raise an error for settings that the page does not have or that are out of range."""
    numbers = {control.name: control for control in (*CONTROLS, *OTHERS)}
    for part in filter(None, view.split("&")):
        name, _, value = part.partition("=")
        value = unquote(value)
        if name in numbers:
            _require_number(numbers[name], value)
        elif name == "rule" and value not in THIRD:
            raise SettingError(f"Unknown rule {value!r} in --view. Expected one of: {', '.join(THIRD)}.")
        elif name not in ("rule", *TEXTS):
            known = ", ".join((*numbers, "rule", *TEXTS))
            raise SettingError(f"Unknown setting {name!r} in --view. Expected one of: {known}.")


def _require_number(control: Control, text: str) -> None:
    try:
        if control.low <= float(text) <= control.high:
            return
    except ValueError:
        pass
    expected = f"Expected a number from {control.low:,} to {control.high:,} for {control.name} in --view"
    raise SettingError(f"{expected}, got {text!r}.")


def explore_page() -> str:
    """Return the page as a string. It sends no request, and treats everything in its address as text."""
    shape, weights = _bundled_model()
    recorded = json.loads(read_templates(RECORDED))
    data = {
        "controls": list(map(asdict, CONTROLS)),
        "others": list(map(asdict, OTHERS)),
        "limits": {"diluted": DILUTED_SPREAD, "margin": CRITICAL_MARGIN, "frozen": FROZEN, "uniform": UNIFORM_BELOW},
        "model": shape,
        "recorded": recorded,
    }
    parts = {
        "controls": CONTROLS,
        "presets": presets(),
        "steps": STEPS,
        "initialisations": _initialisations(),
        "most_bytes": MOST_BYTES,
        "rules": {rule.name: rule.formula for rule in catalogue() if rule.name in THIRD},
        "recorded": recorded,
        "weights": weights,
        "version": __version__,
    }
    return fill("explore/page.html.j2", "Why √dₖ? · attnscale explore", STYLES, SCRIPTS, data, parts)


def _bundled_model() -> tuple[dict[str, Any], Markup]:
    """Return the bundled model: its shape with the order of its tensors, and its float16 weights in base64."""
    model, _ = load_bundled()
    tensors = {name: tensor.half() for name, tensor in model.state_dict().items()}
    attention = attentions_of(model)[0]
    shape = {
        "vocabulary": model.head.out_features,
        "d_model": model.head.in_features,
        "layers": len(model.blocks),
        "heads": attention.heads,
        "head_dim": attention.head_dim,
    }
    sizes = [[name, tensor.numel()] for name, tensor in tensors.items()]
    written = b"".join(tensor.numpy().astype("<f2").tobytes() for tensor in tensors.values())
    return {"shape": shape, "tensors": sizes, "most_bytes": MOST_BYTES}, Markup(base64.b64encode(written).decode())


def _initialisations() -> list[dict[str, Any]]:
    """List the initial spread of the components of q and k for normalised inputs."""
    found = []
    for name, (initialisation, parts) in INITIALISATIONS.items():
        variance = Initialisation.parse(initialisation).projected_variance(WIDTH, parts * WIDTH)
        found.append({"name": name, "std": math.sqrt(variance)})
    return found
