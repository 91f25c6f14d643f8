"""Claims of the forum discussion that ties 1/√d_k to initialisation."""

import math
from statistics import median

import numpy as np

from attnscale.claims import post, textbook, tutorial
from attnscale.claims.draws import drawn_spread, head_spread, head_std
from attnscale.claims.evidence import DIM, DIMS, KEYS, NEAR_ONE, SPREAD, below, mostly_one_hot
from attnscale.claims.judging import CONFIRMED, Evidence, Limit, Number, Source, Statement, judge
from attnscale.claims.settings import FULL_SIZE, language_models
from attnscale.reference import row_statistics, softmax, softmax_jacobian
from attnscale.theory.limits import SATURATED_TOP1

SOURCE = Source(
    "forum",
    "The 1/√d_k scaling in attention isn’t Numerical Stability: Here’s the actual math and why it breaks without it",
    "discussion",
)

LOGITS = np.array([-20.0, 3.0, 25.0, -15.0])
EASILY = 0.5  # what is easily met is met more often than not
MODERN = 2021  # the year after GPT-3, whose largest heads have 128 dimensions
EXTREMELY_SMALL = 1e-6


def _unscaled_float16() -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
    """A seeded row of unscaled scores at d_k = 64, in the lowest precision attention is computed in."""
    return (SPREAD * np.random.default_rng(0).standard_normal(KEYS)).astype(np.float16)


def _stable_without_scale() -> Evidence:
    scores = _unscaled_float16()
    terms = np.exp(scores - scores.max())
    error = float(abs(terms / terms.sum(dtype=np.float32) - softmax(scores)).max())
    return Evidence(error < 1e-3, f"float16 weights of unscaled scores are off by {error:.1g} at most")


def _stable_without_shift() -> Evidence:
    scores = _unscaled_float16()
    with np.errstate(over="ignore"):
        overflown = int(np.isinf(np.exp(scores)).sum())
    return Evidence(not overflown, f"{overflown} of {KEYS} exponentials overflow")


def _root_dim() -> Evidence:
    spreads = {dim: drawn_spread(dim) for dim in DIMS}
    shown = f"std {spreads[DIM].std:.2f} drawn at d_k = {DIM}, {spreads[DIMS[-1]].std:.1f} at {DIMS[-1]}"
    return Evidence(all(found.is_(dim) for dim, found in spreads.items()), shown)


def _typical_dim(since: int, before: int) -> Evidence:
    typical = median(setting.head_dim for setting in language_models(since, before, millions=FULL_SIZE))
    return Evidence(typical == DIM, f"published: median {typical:g}")


def _met(keys: int) -> Evidence:
    """Chance that a row of N(0, 8²) scores reaches both the highest and the lowest of the example's."""
    low, high = below(LOGITS.min() / SPREAD), 1 - below(LOGITS.max() / SPREAD)
    chance = 1 - (1 - low) ** keys - (1 - high) ** keys + (1 - low - high) ** keys
    return Evidence(chance > EASILY, f"{chance:.2g} of rows over {keys} keys reach both ends")


def _example_one_hot() -> Evidence:
    top1 = row_statistics(LOGITS).top1.item()
    return Evidence(top1 > SATURATED_TOP1, f"1 − {1 - top1:.1e} on one key")


def _example_gradients() -> Evidence:
    others = np.delete(np.diag(softmax_jacobian(softmax(LOGITS))), LOGITS.argmax())
    return Evidence(bool(others.max() < EXTREMELY_SMALL), f"at most {others.max():.1e}")


def _softer() -> Evidence:
    before, after = row_statistics(LOGITS), row_statistics(LOGITS / SPREAD)
    shown = f"1 − Σp² from {before.gradient_gain.item():.1e} to {after.gradient_gain.item():.2f}"
    return Evidence(bool(after.entropy > before.entropy), f"{shown}, top weight {after.top1.item():.2f}")


def _depends_on_initialisation() -> Evidence:
    scales = {name: 1 / head_spread(name) for name in ("Xavier", "GPT-2")}
    shown = ", ".join(f"{scale:.3f} for {name}" for name, scale in scales.items())
    return Evidence(not math.isclose(*scales.values(), rel_tol=NEAR_ONE), f"unit spread needs {shown}, drawn")


def _xavier(name: str) -> Evidence:
    std = head_std(name)
    return Evidence(abs(std - 1) < NEAR_ONE, f"q std {std:.2f} ({name})")


def _told(told: dict[str, str]) -> list[str]:
    """The other texts whose claim of this id is in the ledger and holds."""
    rooms = {room.SOURCE.name: room for room in (post, tutorial, textbook)}
    entries = {name: next(each for each in rooms[name].CLAIMS if each.id == id_) for name, id_ in told.items()}
    return [name for name, entry in entries.items() if judge(entry, rooms[name].SOURCE).verdict == CONFIRMED]


def _all_name_saturation() -> Evidence:
    found = _told(NAMING_SATURATION)
    return Evidence(
        len(found) == len(NAMING_SATURATION), f"{len(found)} of {len(NAMING_SATURATION)} other texts here do"
    )


def _few_derive() -> Evidence:
    found = _told(DERIVING)
    holds = len(found) <= ALMOST_NONE * len(DERIVING)
    return Evidence(
        holds, f"{len(found)} of {len(DERIVING)} other texts here derive Var(q·k) = d_k: {', '.join(found)}"
    )


# Where each of the other texts says that large scores saturate softmax, and where it derives the constant.
NAMING_SATURATION = {
    "post": "large-scores-sharpen",
    "tutorial": "softmax-50-10-5",
    "textbook": "one-position-contributes",
}
DERIVING = {"post": "score-variance", "tutorial": "variance-3", "textbook": "normal-product-variance"}
ALMOST_NONE = 0.2  # of them


CLAIMS: tuple[Number | Statement, ...] = (
    Statement(
        "all-name-saturation",
        "Every resource says that the scale prevents softmax from saturating.",
        "every",
        _all_name_saturation,
        remark="As far as these four texts go.",
    ),
    Statement(
        "almost-none-explain",
        "Almost none explain why saturation happens, or why that constant.",
        "almost none",
        _few_derive,
        remark="As far as these four texts go; so does the paper of 2017, in a footnote.",
    ),
    Statement(
        "not-numerical-stability",
        "The scale is not there for numerical stability.",
        "not numerical",
        _stable_without_scale,
        Limit("when softmax subtracts its maximum", "of plain exponentials in float16", _stable_without_shift),
    ),
    Statement("score-std-root-dim", "Unscaled scores have the standard deviation √d_k.", "√d_k", _root_dim),
    Statement(
        "typical-head-dim",
        "64 is the typical d_k.",
        "64",
        lambda: _typical_dim(0, MODERN),
        Limit(f"before {MODERN}", "since", lambda: _typical_dim(MODERN, 9999)),
    ),
    Statement(
        "logits-easily-25",
        "An unscaled row of scores may well read [-20, 3, 25, -15].",
        "-20 to 25",
        lambda: _met(KEYS),
        Limit(f"over {KEYS} keys", "over four, as in the example", lambda: _met(LOGITS.size)),
        remark=f"The four have a standard deviation of {LOGITS.std(ddof=1):.1f}, not {SPREAD:g}.",
    ),
    Statement(
        "example-logits-one-hot", "Softmax of [-20, 3, 25, -15] is nearly one-hot.", "near one-hot", _example_one_hot
    ),
    Statement(
        "example-gradients-small",
        "Of [-20, 3, 25, -15] all but the largest receive hardly any gradient.",
        "extremely small",
        _example_gradients,
    ),
    Statement(
        "picks-one-token",
        "Unscaled at d_k = 64, attention picks a single token.",
        "one token",
        _example_one_hot,
        Limit("for the four logits of the example", "for most rows at a spread of 8", mostly_one_hot),
    ),
    Number("scaled-example-logits", "[-20, 3, 25, -15] divided by 8.", "-2.5 0.4 3.1 -1.9", lambda: LOGITS / SPREAD),
    Statement(
        "scaled-example-softer", "Divided by 8, [-20, 3, 25, -15] give a softer distribution.", "softer", _softer
    ),
    Statement(
        "initialisation-dependent",
        "The right scale depends on the variance that q and k start with.",
        "depends on initialisation",
        _depends_on_initialisation,
    ),
    Statement(
        "xavier-unit-variance",
        "Projections typically start q and k near unit variance, by Xavier initialisation.",
        "std near 1",
        lambda: _xavier("Xavier"),
        Limit(
            "for square matrices drawn separately",
            "for q, k and v drawn as one",
            lambda: _xavier("nn.MultiheadAttention"),
        ),
    ),
)
