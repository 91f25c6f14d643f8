"""QK-Clip of attentions that cannot be measured inside: their modules run uncompiled, followed at every step."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from attnscale.acting.clip import ClipReport, clip_qk_
from attnscale.acting.folding import Folding
from attnscale.acting.replicas import Axis
from attnscale.inside.apart import Apart
from attnscale.inside.places import Places
from attnscale.plain import printable
from attnscale.watching.layer import Layer
from attnscale.watching.seen import Seen
from attnscale.watching.settings import Settings


@dataclass(frozen=True)
class _Seen:
    layers: dict[str, Layer]


class ClippedApart:
    """Modules of a model that are followed, until they are left."""

    def __init__(self, places: Places, threshold: float) -> None:
        self._places, self._threshold, self._stack = places, threshold, ExitStack()
        self._begin()

    def _begin(self) -> None:
        model, root = self._places.model, type(self._places.model).__name__
        declare = partial(self._places.known.declared, model)
        self._seen = Seen(lambda path: path or root, declare, lambda _: ())
        apart = Apart(model, Settings(None, training=True, may_be_empty=True), self._seen)
        self._stack.enter_context(apart.followed(self._places.apart))

    def leave(self) -> None:
        """Follow them no more."""
        self._stack.close()

    def clip(self) -> ClipReport | None:
        """Clip what passed the threshold since the last step; None where nothing did."""
        self.leave()
        report = clip_qk_(self._places.model, _Seen(dict(self._seen.layers)), self._threshold)
        self._begin()
        return report if report.heads or report.left else None


def why_not_apart(places: Places, layers: Mapping[str, Layer], axes: Sequence[Axis]) -> str:
    """Why modules cannot be clipped apart from the others; empty where they can, or where there are none."""
    if not places.apart:
        return ""
    followed = f"what {', '.join(map(printable, places.apart))} attends with must be followed every time"
    if axes:
        return f"{followed}, on every rank"
    names = []
    for is_apart in (True, False):
        own = {name: layer for name, layer in layers.items() if (layer.module in places.apart) == is_apart}
        names.append({id(places.model.get_parameter(block.name)) for block, _ in Folding(places.model, own).blocks()})
    return f"{followed}, and shares parameters with others" if names[0] & names[1] else ""


def together(first: ClipReport | None, second: ClipReport | None) -> ClipReport | None:
    """One report of what both tell."""
    if first is None or second is None:
        return first or second
    return ClipReport(first.threshold, first.heads + second.heads, first.left + second.left)
