"""Claims of the forum discussion that relates 1/√d_k to initialisation.

Two statements about all other texts cannot be tested here, and are omitted.
"""

import math
from statistics import NormalDist, median

import numpy as np

from attnscale.claims import computations as compute
from attnscale.claims.computations import DIM, DIMS, KEYS, NEAR_ONE, SPREAD
from attnscale.claims.judging import Entry, Evidence, Limit, Source
from attnscale.claims.settings import FULL_SIZE, language_models
from attnscale.reference import softmax, softmax_jacobian
from attnscale.theory.limits import SATURATED_TOP1

SOURCE = Source(
    "forum",
    "The 1/√d_k scaling in attention isn’t Numerical Stability: Here’s the actual math and why it breaks without it",
    "discussion",
)

LOGITS = np.array([-20.0, 3.0, 25.0, -15.0])
EASILY = 0.5  # smallest probability that counts as easily
MODERN = 2021  # the year after GPT-3, which has heads of 128 dimensions
EXTREMELY_SMALL = 1e-6


def _unscaled_float16() -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
    """Return a row of unscaled scores at d_k = 64 in float16, the lowest precision of attention."""
    return (SPREAD * np.random.default_rng(0).standard_normal(KEYS)).astype(np.float16)


def _stable_without_shift() -> Evidence:
    with np.errstate(over="ignore"):
        overflowed = int(np.isinf(np.exp(_unscaled_float16())).sum())
    return Evidence(not overflowed, f"without the subtraction {overflowed} of {KEYS} exponentials overflow")


def _stable_without_scale() -> Evidence:
    scores = _unscaled_float16()
    terms = np.exp(scores - scores.max())
    error = float(abs(terms / terms.sum(dtype=np.float32) - softmax(scores)).max())
    return Evidence(error < 1e-3, f"float16 weights of unscaled scores are off by at most {error:.1g}")


def _typical_dim(since: int, before: int) -> Evidence:
    typical = median(setting.head_dim for setting in language_models(since, before, millions=FULL_SIZE))
    return compute.published([f"median {typical:g}"], typical == DIM)


def _reach(keys: int) -> Evidence:
    """Test if a row of N(0, 8²) scores often reaches both the lowest and the highest score of the example."""
    normal = NormalDist()
    low, high = normal.cdf(LOGITS.min() / SPREAD), 1 - normal.cdf(LOGITS.max() / SPREAD)
    chance = 1 - (1 - low) ** keys - (1 - high) ** keys + (1 - low - high) ** keys
    return Evidence(chance > EASILY, f"{chance:.2%} of rows over {keys} keys reach both ends")


def _example_one_hot() -> Evidence:
    return compute.row_has(LOGITS, "top1", above=SATURATED_TOP1)


def _example_gradients() -> Evidence:
    others = np.delete(np.diag(softmax_jacobian(softmax(LOGITS))), LOGITS.argmax())
    return Evidence(bool(others.max() < EXTREMELY_SMALL), f"at most {others.max():.1e}")


def _depends_on_initialisation() -> Evidence:
    scales = {name: 1 / compute.head_spread(name).mean for name in ("Xavier", "GPT-2")}
    shown = ", ".join(f"{scale:.3f} for {name}" for name, scale in scales.items())
    return Evidence(not math.isclose(*scales.values(), rel_tol=NEAR_ONE), f"a spread of one needs {shown}")


def _query_std_is_one(initialisation: str) -> Evidence:
    return compute.near_one("q std", {initialisation: compute.head_std(initialisation)})


SOURCE.add(
    "the whole post",
    Entry("not-numerical-stability", "The scale is not there for numerical stability.", "not numerical",
          _stable_without_scale,
          limit=Limit("when softmax subtracts its maximum", "for plain exponentials in float16",
                      _stable_without_shift)),
    Entry("score-std-root-dim", "Unscaled scores have the standard deviation √d_k.", "√d_k",
          lambda: compute.drawn_spread_is(0.0, *DIMS)),
    Entry("typical-head-dim", "64 is the typical d_k.", "64", lambda: _typical_dim(0, MODERN),
          "Medians over a selection of models, not all.",
          Limit(f"before {MODERN}", "since", lambda: _typical_dim(MODERN, 9999))),
    Entry("logits-easily-25", "An unscaled row of scores may well read [-20, 3, 25, -15].", "-20 to 25",
          lambda: _reach(KEYS), f"The four have a standard deviation of {LOGITS.std(ddof=1):.1f}, not {SPREAD:g}.",
          Limit(f"over {KEYS} keys", "over four, as in the example", lambda: _reach(LOGITS.size))),
    Entry("example-logits-one-hot", "Softmax of [-20, 3, 25, -15] is nearly one-hot.", "near one-hot",
          _example_one_hot),
    Entry("example-gradients-small", "Of [-20, 3, 25, -15] all but the largest receive hardly any gradient.",
          "extremely small", _example_gradients),
    Entry("picks-one-token", "Unscaled at d_k = 64, attention picks a single token.", "one token", _example_one_hot,
          limit=Limit("for the four logits of the example", "for most rows at a spread of 8", compute.mostly_one_hot)),
    Entry("scaled-example-logits", "[-20, 3, 25, -15] divided by 8.", "-2.5 0.4 3.1 -1.9", lambda: LOGITS / SPREAD),
    Entry("scaled-example-softer", "Divided by 8, [-20, 3, 25, -15] give a softer distribution.", "softer",
          lambda: compute.is_softer(LOGITS, LOGITS / SPREAD)),
    Entry("initialisation-dependent", "The right scale depends on the variance that q and k start with.",
          "depends on initialisation", _depends_on_initialisation),
    Entry("xavier-unit-variance", "Projections typically start q and k near unit variance, by Xavier initialisation.",
          "std near 1", lambda: _query_std_is_one("Xavier"),
          limit=Limit("for square matrices drawn separately", "for q, k and v drawn as one matrix",
                      lambda: _query_std_is_one("nn.MultiheadAttention"))),
)  # fmt: skip
