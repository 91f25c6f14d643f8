"""QKClip: QK-Clip after every step of the optimiser, for what measuring inside the model's own run costs."""

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from attnscale.acting.clip import ClipReport, check_threshold, clip_qk_
from attnscale.acting.replicas import Axis, axes_of
from attnscale.acting.taken import arrives_by, note_taken
from attnscale.errors import InputError, NotInsideWarning
from attnscale.inside.places import Places
from attnscale.plain import printable
from attnscale.torch_internals import never_compiled
from attnscale.train.clipped_apart import ClippedApart, together, why_not_apart
from attnscale.train.clipped_inside import ClippedInside
from attnscale.train.coverage import Coverage
from attnscale.watching.known.known_model import KnownModel
from attnscale.watching.layer import Layer
from attnscale.watching.seen import Seen
from attnscale.watching.settings import Settings
from attnscale.watching.watch import watched


class _BrokenOffError(Exception):
    """A step that is not watched to its end."""


@dataclass(frozen=True)
class _Seen:
    layers: dict[str, Layer]


class QKClip:
    """Hold the scores of a model in training under a threshold, after every step of its optimiser.

    Call step() after each, or attach() it to the optimiser. The first step is followed from outside, uncompiled, and
    tells which parameters make which heads. After that maxima are exact over every row of every micro-batch, taken
    where the model attends, compiled or not, and recomputation is not counted again. On a GPU nothing is waited for:
    parameters are multiplied by factors that are computed there, and the report of what was clipped comes with a
    later step. A module that attends only later is followed when it does. An attention that cannot be measured inside
    is followed at every step, uncompiled: its module alone, or the whole model where that cannot run apart; that is
    told once.

    Where torch.distributed runs, make one on every rank and call step() on all alike; ranks agree by one collective
    over those that hold the same model, or parts of it. Ranks that are not found, copies without DDP or ranks that
    share out keys, are told by their `group`. What clip_qk_ promises holds.

    >>> import torch
    >>> from attnscale.models import CausalTransformer
    >>> model = CausalTransformer(vocabulary=17, d_model=32, layers=1, heads=2)
    >>> optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    >>> clip = QKClip(model, threshold=0.1)
    >>> for _ in range(2):
    ...     model(torch.arange(10)[None]).square().mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     report = clip.step()
    >>> clip.last.threshold
    0.1
    >>> clip.close()
    """

    def __init__(self, model: nn.Module, threshold: float = 100.0, *, group: "dist.ProcessGroup | None" = None) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"Expected a torch.nn.Module to clip, got {type(model).__name__}.")
        check_threshold(threshold)
        self.model, self._threshold, self._group = model, float(threshold), group
        self.steps = 0
        self._last: ClipReport | None = None
        self._outside: tuple[AbstractContextManager[Seen], Seen] | None = None
        self._inside: ClippedInside | None = None
        self._apart: ClippedApart | None = None  # beside what is inside
        self._known: KnownModel | None = None
        self._coverage = Coverage()
        self._warned: set[str] = set()
        self._goes_inside, self._is_closed = True, False
        arrives_by(model, self.flush)
        self._watch()

    @property
    def threshold(self) -> float:
        """What no score is to pass; another one needs another QKClip, or load_state_dict()."""
        return self._threshold

    @property
    def is_inside(self) -> bool:
        """Whether maxima are taken where the model attends, and nothing runs uncompiled for them."""
        return self._inside is not None

    @property
    def last(self) -> ClipReport | None:
        """The report of the last step that clipped anything, once all that is on its way has arrived."""
        self.flush()
        return self._last

    @never_compiled  # as an optimiser's step may be, and what is called after it
    def step(self) -> ClipReport | None:
        """The optimiser has moved: clip what passed the threshold; a report where something is known to be clipped."""
        if self._is_closed:
            raise InputError("Expected a QKClip that is open, got one that was closed.")
        self.steps += 1
        if self._inside is None:
            return self._clip_outside()
        if not self._inside.is_current:  # a part was replaced, or it was moved or converted: followed anew
            self.flush()
            self._forget()
            self._watch()
            return None
        if not self._inside.misses():
            found = self._arrived(self._inside.clip())
            if self._apart is not None:
                found = self._told(together(found, self._apart.clip()))
            self._follow_more()
            return found
        self._leave()
        self._stay_outside("some of them did not run where they ran before")
        self._watch()
        return None

    def attach(self, optimizer: Optimizer) -> RemovableHandle:
        """Call step() after every step of this optimiser; remove() of what is returned ends it."""

        def after(*_: Any) -> None:
            self.step()

        return optimizer.register_step_post_hook(after)

    def flush(self) -> ClipReport | None:
        """Wait for what is on its way from a device; the last report that this brought."""
        return None if self._inside is None else self._arrived(self._inside.arrived(waits=True))

    def close(self) -> None:
        """Stop, and leave nothing in place."""
        self.flush()
        self._forget()
        self._is_closed = True

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: plain values, for any checkpoint."""
        return {"steps": self.steps, "threshold": self.threshold}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where state_dict() was taken, with its threshold; what was seen since the last step is forgotten."""
        threshold = float(state["threshold"])
        check_threshold(threshold)
        self.flush()
        self._forget()
        self.steps, self._threshold = int(state["steps"]), threshold
        self._watch()

    def __enter__(self) -> "QKClip":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch(self) -> None:
        """Watch the next step from outside."""
        known = None if self._known is None or self._coverage.is_uneven else self._known.from_outside
        watch = watched(self.model, Settings(None, training=True, known=known, may_be_empty=True))
        self._outside = watch, watch.__enter__()

    def _leave(self) -> None:
        outside, inside, self._outside, self._inside = self._outside, self._inside, None, None
        if self._apart is not None:
            self._apart.leave()
            self._apart = None
        if outside is not None:
            outside[0].__exit__(_BrokenOffError, _BrokenOffError(), None)
        if inside is not None:
            inside.leave()

    def _forget(self) -> None:
        """Leave the model, and know nothing of it any more."""
        self._leave()
        self._coverage.leave()
        self._known, self._coverage = None, Coverage()

    def _follow_more(self) -> None:
        """Follow the model again where modules attend, or may, that did not when it was followed, or not as often."""
        assert self._inside is not None  # or all of them are followed
        noticed, exceeds = self._coverage.noticed(), self._inside.exceeds
        if not noticed and not exceeds:
            return
        if self._inside.axes:  # other ranks do not know of it
            self._tell_not_clipped(noticed)
            return
        self.flush()
        self._leave()
        self._known = None
        if exceeds and self._coverage.exceeded():
            self._stay_outside("some of them are called more often at some steps")
        self._watch()

    def _clip_outside(self) -> ClipReport | None:
        assert self._outside is not None  # or inside
        (watch, seen), self._outside = self._outside, None
        try:
            watch.__exit__(None, None, None)
            layers: dict[str, Layer] = dict(seen.layers)
        except InputError:  # no forward ran, as on a rank without data
            layers = {}
        self._known = seen.known_model if layers else None
        report = clip_qk_(self.model, _Seen(layers), self.threshold, group=self._group)
        axes = axes_of(self.model, self._group) if self._goes_inside else []
        if not self._goes_inside or not self._go_inside(layers, axes):
            self._watch()
        return self._told(report if report.heads or report.left else None)

    def _told(self, report: ClipReport | None) -> ClipReport | None:
        self._last = report or self._last
        return report

    def _go_inside(self, layers: dict[str, Layer], axes: list[Axis]) -> bool:
        """Measure inside from now on, where all ranks can."""
        places = None if self._known is None else Places(self.model, self._known)
        why = why_not_inside(places, layers)
        why = why or ("" if places is None else why_not_apart(places, layers, axes))
        heads = {name: layer.heads for name, layer in layers.items()}
        ran, differ = bool(layers), False
        if self._known is not None and self._coverage.lacks(self._known):
            why, self._known = why or self._coverage.why_not_inside, None
            ran = bool(why)
        for axis in axes:
            told = axis.gathered((why, heads, ran))
            why = next((theirs for theirs, _, _ in told if theirs), "")
            ran = all(each for *_, each in told)
            differ |= not axis.cut and any(theirs != heads for _, theirs, _ in told)
        if not ran or (differ and not why):
            return False  # nothing ran on some rank, or not all that attends; perhaps the next time
        if why or places is None:
            self._stay_outside(why)
            return False
        inside = {name: layer for name, layer in layers.items() if layer.module not in places.apart}
        self._coverage.begin(places)
        self._inside = ClippedInside(self.model, places, inside, self.threshold, axes)
        if places.apart:
            self._apart = ClippedApart(places, self.threshold)
            self._tell_apart(places.apart)
        return True

    def _stay_outside(self, why: str) -> None:
        self._goes_inside = False
        self._coverage.leave()
        warnings.warn(
            "QK-Clip watches this model from outside at every step, uncompiled, since its attentions cannot be "
            f"measured inside its run: {why}.",
            NotInsideWarning,
            stacklevel=4,
        )

    def _tell_not_clipped(self, modules: Iterable[str]) -> None:
        which = ", ".join(map(printable, sorted(modules))) or "it attends more often than then"
        told = (
            "QK-Clip leaves some attentions of this model as they are, since they did not run when it was followed, "
            f"and no rank follows it again by itself: {which}."
        )
        if told not in self._warned:
            self._warned.add(told)
            warnings.warn(told, NotInsideWarning, stacklevel=4)

    def _tell_apart(self, modules: Iterable[str]) -> None:
        warnings.warn(
            "QK-Clip watches some modules of this model from outside at every step, uncompiled, since their attentions "
            f"cannot be measured inside its run: {', '.join(map(printable, modules))}.",
            NotInsideWarning,
            stacklevel=5,
        )

    def _arrived(self, reports: list[ClipReport]) -> ClipReport | None:
        for report in reports:
            self._last = report
            note_taken(self.model, report.factors)
        return reports[-1] if reports else None


def why_not_inside(places: Places | None, layers: dict[str, Layer]) -> str:
    """Why what passes a threshold cannot be told inside a model's run; empty where it can."""
    if places is None or not places.are_complete:
        return "not all of them are called alike at every step, by functions that are known"
    for name, layer in layers.items():
        if layer.module not in places.apart and (layer.highest_bias or layer.sinks is not None):
            return f"more than products of queries and keys is in the scores of {name}"
    return ""
