"""Index: every exercise, listing and worked example of the four texts, and the command that does it."""

from dataclasses import dataclass
from urllib.parse import quote


@dataclass(frozen=True)
class Worked:
    """Something that a text works out or asks for, and what to type for it."""

    source: str
    kind: str  # exercise, listing or worked example
    what: str
    command: str


def _explore(**settings: object) -> str:
    """The page of `attnscale explore` at a view."""
    view = "&".join(f"{name}={quote(str(value), safe=', ')}" for name, value in settings.items())
    return f'attnscale explore --view "{view}"'


def _claims(*ids: str) -> str:
    return " ".join(["attnscale claims", *ids])


EXERCISE, LISTING, EXAMPLE = "exercise", "listing", "worked example"

INDEX = (
    Worked("post", EXAMPLE, "Var(q·k/√d_k) = 1", _claims("scaled-variance-identity", "scaled-variance-near-one")),
    Worked("post", EXAMPLE, "dividing by d_k instead: variance 1/d_k, weights alike", "attnscale lab divisors"),
    Worked("tutorial", EXAMPLE, "heights of students: what variance is", _claims("height-ranges")),
    Worked("tutorial", EXAMPLE, "the nine terms of (q·k)² at d_k = 3", _explore(dim=3, step=3)),
    Worked("tutorial", EXAMPLE, "the 4,096 terms at d_k = 64", _claims("terms-64", "own-terms-64", "cross-terms-64")),
    Worked("tutorial", EXAMPLE, "e to the 1, 5, 10, 20 and 50",
           _claims("exp-1", "exp-5", "exp-10", "exp-20", "exp-50")),
    Worked("tutorial", EXAMPLE, "softmax of [50, 10, 5]", _explore(scores="50, 10, 5")),
    Worked("tutorial", EXAMPLE, "softmax of [5, 1, 0.5]", _explore(scores="5, 1, 0.5")),
    Worked("tutorial", EXAMPLE, "[2, 4, 6] and its half: the variance falls by four",
           _claims("variance-2-4-6", "variance-1-2-3", "variance-ratio")),
    Worked("tutorial", EXAMPLE, "q = [1, 0, 1, 0] and k = [0, 1, 1, 1]: a score of 1, scaled 0.5",
           _explore(query="1, 0, 1, 0", key="0, 1, 1, 1")),
    Worked("tutorial", EXAMPLE, "scores [14, 10, 12] at d_k = 64, with and without scaling",
           _explore(scores="14, 10, 12", d=64)),
    Worked("textbook", EXAMPLE, "Var(XY) = 1 of two standard normals",
           _claims("normal-product-mean", "normal-product-square", "normal-product-variance")),
    Worked("textbook", EXAMPLE, "softmax of [8.5, -2.1, 7.9]", _explore(scores="8.5, -2.1, 7.9")),
    Worked("textbook", EXAMPLE, "d_k = 64: spread 8 without, 1 with the scale",
           "attnscale predict --d-model 512 --heads 8"),
    Worked("textbook", EXAMPLE, "five positions, with and without scaling",
           _explore(scores="9.2, -3.1, 8.8, -5.4, 1.2", d=64)),
    Worked("textbook", EXAMPLE, "the softmax Jacobian of [1, 0, 0] and of [0.3, 0.3, 0.2, 0.2]",
           _claims("jacobian-formula", "one-hot-gradients", "mixed-gradients")),
    Worked("textbook", LISTING, "scaled_dot_product_attention", _claims("implementation")),
    Worked("textbook", LISTING, "stable_softmax", _claims("softmax-overflows", "stable-softmax-same")),
    Worked("textbook", EXERCISE, "1. the standard deviation at d_k = 512", "attnscale predict --d-model 512 --heads 1"),
    Worked("textbook", EXERCISE, "2. softmax([x, 0, 0, 0]) as x goes from 0 to 10", "attnscale lab saturation"),
    Worked("textbook", EXERCISE, "3. attention trained with and without scaling", "attnscale demo"),
    Worked("textbook", EXERCISE, "3. the same over head sizes, rates and seeds", "attnscale lab ablation"),
    Worked("textbook", EXERCISE, "4. temperatures of ½√d_k, √d_k and 2√d_k", "attnscale lab temperature"),
    Worked("textbook", EXERCISE, "5. ∂softmax/∂input of peaked and uniform rows", "attnscale lab gradients"),
    Worked("textbook", EXAMPLE, "when scaling matters most: in a trained model", "attnscale lab trained"),
    Worked("forum", EXAMPLE, "logits [-20, 3, 25, -15], and divided by 8", _explore(scores="-20, 3, 25, -15", d=64)),
    Worked("forum", EXAMPLE, "the constant depends on the initialisation", "attnscale lab initialisation"),
)  # fmt: skip
