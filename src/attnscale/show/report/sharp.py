"""Pictures of the sharpest heads: where their queries look."""

import math
from collections.abc import Mapping

from torch import Tensor
from torch.nn.functional import max_pool2d

from attnscale.diagnose.pattern import pattern_of
from attnscale.diagnose.verdict import Verdict, head_verdicts
from attnscale.show.report.figures import Axis, Figure, Heat
from attnscale.watching import Layer

SHOWN = 8  # heads
SIDE = 64  # fields a side, at most


def sharp_heads(name: str, layers: Mapping[str, Layer]) -> Figure | None:
    """The weights of those past the freezing point, the sharpest first; None where there are none to show."""
    heads = [head for layer in layers.values() if layer.kept for head in head_verdicts(layer) if head.is_past_freezing]
    heads.sort(key=lambda head: head.entropy_ratio)
    views = {f"{head.layer}, head {head.head}": _view(layers[head.layer], head) for head in heads[:SHOWN]}
    left_out = len(heads) - len(views)
    caption = f"The {len(views)} sharpest of {len(heads)} such heads." if left_out > 0 else ""
    return Figure(name, views, choose="Show", caption=caption) if views else None


def _view(layer: Layer, found: Verdict) -> Heat:
    assert found.head is not None  # of heads, not of a layer
    weights = layer.weights(found.head).double().cpu()
    (queries, keys), (by_query, by_key) = weights.shape, (math.ceil(size / SIDE) for size in weights.shape)
    fields: Tensor = max_pool2d(weights[None, None], (by_query, by_key), ceil_mode=True)[0, 0]
    told = "" if (looks_at := pattern_of(layer, found.head)) is None else f"{looks_at}."
    more = "" if by_query == by_key == 1 else " A field shows the largest of its weights."
    return Heat(
        values=fields.tolist(),
        x=Axis("key" if by_key == 1 else f"key / {by_key}"),
        y=Axis("query" if by_query == 1 else f"query / {by_query}"),
        unit="weight",
        rows=_names(queries, by_query),
        columns=_names(keys, by_key),
        column="key",
        low=0.0,
        high=1.0,
        notice=f"{told}{more}".strip(),
    )


def _names(size: int, step: int) -> tuple[str, ...]:
    ends = ((start, min(start + step, size) - 1) for start in range(0, size, step))
    return tuple(str(start) if start == end else f"{start}–{end}" for start, end in ends)
