"""How it was measured: what the words mean, and how far sampled numbers may be off."""

from collections.abc import Mapping

import torch

from attnscale.show.numbers import number
from attnscale.show.report.heads import METRICS
from attnscale.show.report.parts import Row, Table, Terms
from attnscale.watching import Layer

WORDS = Terms(
    {
        "spread": "standard deviation of the scores that softmax sees, over visible keys",
        "expected spread": "that of independent queries and keys of the norms measured: "
        "expected scale · ‖q‖ · ‖k‖ / √d_k",
        "scale": "slope of the softmax’s real input on q·k; 1/√d_k is expected where the model’s configuration names "
        "none",
        "freezing point": "√(2 ln n): over n scores that spread wider, a handful of keys takes everything",
        "entropy of ln n": "entropy of a row’s weights over that of uniform weights",
        "top-1": "the largest weight of a row",
        "saturated": "share of rows that give one key more than 0.99",
        "gradient gain": "1 − Σp², what softmax lets through",
        "largest score": "of all visible scores before softmax",
    }
)


def words(*left_out: str) -> Terms:
    """What the words of a report mean."""
    return Terms({word: meaning for word, meaning in WORDS.entries.items() if word not in left_out})


def errors_of(layers: Mapping[str, Layer]) -> Table | str:
    """Standard errors over all heads where rows were sampled; a sentence where there are none."""
    seen = [layer.stats for layer in layers.values()]
    if all(stats.exact for stats in seen):
        return "Every row was looked at, so no number here has a sampling error: all standard errors are zero."
    rows = []
    for title, metric in METRICS.items():
        if metric.statistic == "max":
            continue
        errors = torch.cat([stats.stderr(metric.statistic).double() for stats in seen])
        known = errors[torch.isfinite(errors)]
        typical, worst = (known.median(), known.max()) if len(known) else (torch.tensor(torch.nan),) * 2
        rows.append(Row((title, number(float(typical)), number(float(worst)))))
    bound = max(float(stats.max_bound.nan_to_num(-torch.inf).max()) for stats in seen)
    caption = (
        "Standard errors of single heads, from having looked at some rows only. The largest score has a bracket "
        f"instead: none of all rows is above {number(bound)}."
    )
    return Table(("", "typical standard error", "largest"), (("", tuple(rows)),), caption=caption)
