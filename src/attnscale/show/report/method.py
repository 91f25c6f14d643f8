"""How it was measured: what the words mean, and how far sampled numbers may be off."""

from collections.abc import Mapping

import torch

from attnscale.measure.statistics import STATISTICS, Place, in_place
from attnscale.show.numbers import number
from attnscale.show.report.heads import mapped
from attnscale.show.report.parts import Row, Table, Terms
from attnscale.watching import Layer

# What stands beside the statistics where a model was watched.
OF_MODELS = {
    "expected spread": "spread of independent queries and keys of the norms measured: "
    "expected scale · ‖q‖ · ‖k‖ / √d_k",
    "scale": f"{STATISTICS['scale'].meaning}; {STATISTICS['scale'].reading}",
    "freezing point": "√(2 ln n): over n scores that spread wider, a handful of keys takes everything",
}


def words_of_models() -> Terms:
    """What the words of a report on a model mean."""
    return Terms(_meanings(Place.CHECK | Place.MAP) | OF_MODELS)


def words_of_logs() -> Terms:
    """What the words of a report on a log mean."""
    return Terms(_meanings(Place.RUN | Place.MAP) | {"freezing point": OF_MODELS["freezing point"]})


def _meanings(places: Place) -> dict[str, str]:
    return {entry.long: entry.meaning for entry in in_place(places)}


def errors_of(layers: Mapping[str, Layer]) -> Table | str:
    """Standard errors over all heads where rows were sampled; a sentence where there are none."""
    seen = [layer.stats for layer in layers.values()]
    if all(stats.exact for stats in seen):
        return "Every row was looked at, so no number here has a sampling error: all standard errors are zero."
    rows = []
    for entry in mapped():
        if not entry.has_error or entry.attribute is None:
            continue
        errors = torch.cat([stats.stderr(entry.attribute).double() for stats in seen])
        known = errors[torch.isfinite(errors)]
        typical, worst = (known.median(), known.max()) if len(known) else (torch.tensor(torch.nan),) * 2
        rows.append(Row((entry.long, number(float(typical)), number(float(worst)))))
    bound = max(float(stats.max_bound.nan_to_num(-torch.inf).max()) for stats in seen)
    caption = (
        "Standard errors of single heads, from having looked at some rows only. The largest score has a bracket "
        f"instead: none of all rows is above {number(bound)}."
    )
    return Table(("", "typical standard error", "largest"), (("", tuple(rows)),), caption=caption)
