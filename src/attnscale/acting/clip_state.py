"""State of the clips of a model: factors of each head, and checks that clips have an effect and stay."""

import math
from collections.abc import Callable, Iterable, MutableMapping
from weakref import WeakKeyDictionary, WeakMethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from attnscale.acting.head_rows import Head
from attnscale.acting.replicas import Floats, device_of
from attnscale.acting.scaling import EXPONENT, HeadScaler
from attnscale.measure.stats import ScoreStats
from attnscale.module_paths import without_wrappers
from attnscale.watching.layer import Layer

# The effect of clips is checked when a head exceeds the threshold again after it was scaled by this factor in total.
JUDGED_AT = 1 / 32
# Scores divided by the factors applied to them may then be at most this many times their value before the clips. Data
# and alignment change them by a small factor; clips without effect increase them by at least 1 / JUDGED_AT.
UNEXPLAINED = 16.0
LEAST_LEFT = 1e-3  # smallest total factor for the weights of a head before the effect is checked


class ClipState:
    """All clips of one model, by clip_qk_() and by QKClip."""

    def __init__(self) -> None:
        self.log_factors: dict[Head, float] = {}  # logarithm of the total factor of each head's scores
        self.fetch: WeakMethod[Callable[[], object]] | None = None  # waits for reports from a GPU
        self.said: set[tuple[str, str]] = set()  # skipped layers and reasons that were already logged
        self.stopped: dict[str, str] = {}  # layers that are no longer clipped, and why
        self._effects: dict[object, EffectCheck] = {}  # by the heads that are clipped together
        # Heads that were clipped because of a measurement, which is then out of date for them.
        self._used: MutableMapping[ScoreStats, set[int]] = WeakIdKeyDictionary()

    def note(self, factors: Iterable[tuple[str, int, float]]) -> None:
        """Add the factors by which the scores of heads were multiplied."""
        for layer, head, factor in factors:
            self.log_factors[layer, head] = self.log_factors.get((layer, head), 0.0) + math.log(factor)

    def fresh_maxima(self, layer: Layer) -> Tensor:
        """Return the largest score and its bound, (2, heads), measured since each head's last clip; −∞ if none."""
        measured = layer.measured or (layer.stats,)
        if not any(stats in self._used for stats in measured):
            return _maxima(layer.stats)
        found = torch.full((2, layer.heads), -torch.inf, dtype=torch.float64)
        for stats in measured:
            of_call = _maxima(stats)
            of_call[:, sorted(self._used.get(stats, ()))] = -torch.inf
            found = torch.maximum(found, of_call)
        return found

    def note_used(self, layer: Layer, heads: Iterable[int]) -> None:
        """Mark heads as clipped because of this measurement of a layer."""
        for stats in layer.measured or (layer.stats,):
            self._used.setdefault(stats, set()).update(heads)

    def effect_of(self, scaler: HeadScaler) -> "EffectCheck":
        """Return the check of these heads; the same one at every clip."""
        which = (tuple(scaler.heads), scaler.slots.count, scaler.slots.own.start)
        if which not in self._effects:
            self._effects[which] = EffectCheck(scaler)
        return self._effects[which]


def _maxima(stats: ScoreStats) -> Tensor:
    return torch.stack([stats.max, stats.max_bound]).double().cpu()


_STATES: WeakKeyDictionary[nn.Module, ClipState] = WeakKeyDictionary()


def clip_state(model: nn.Module) -> ClipState:
    """Return the state of the clips of a model."""
    return _STATES.setdefault(model, ClipState())


def clip_logs(model: nn.Module) -> dict[Head, float] | None:
    """Return the logarithm of the total factor of each head's scores, by the layer names of this model.

    None if the model was never clipped.
    """
    found: dict[Head, float] | None = None
    for clipped, state in list(_STATES.items()):
        before, surplus = ("", None) if clipped is model else (_prefix(clipped, model), _prefix(model, clipped))
        if (before, surplus) == (None, None):
            continue  # another model: do not wait for its reports
        fetch = None if state.fetch is None else state.fetch()
        if fetch is not None:
            fetch()
        found = {} if found is None else found
        for (layer, head), factor in state.log_factors.items():
            name = f"{before}{layer}" if before is not None else layer.removeprefix(surplus or "")
            found[name, head] = found.get((name, head), 0.0) + factor
    return found


def _prefix(inner: nn.Module, outer: nn.Module) -> str | None:
    """Return the prefix that `outer` adds to the layer names of its submodule `inner`; None if it is no submodule."""
    found = (without_wrappers(path) for path, module in outer.named_modules() if module is inner)
    path = next(found, None)
    return path if not path else f"{path}."


class EffectCheck:
    """Checks that the scores of clipped heads decrease as their weights are scaled down.

    They do not if the scaled weights are not the ones that produce the scores. A head above the threshold again is not
    a proof: training may have increased its weights. The check divides by that growth.
    """

    def __init__(self, scaler: HeadScaler) -> None:
        count = scaler.slots.count
        self._factors = np.ones(count)  # product of the factors since the last check
        self._before, self._after = np.zeros(count), np.zeros(count)  # largest scores, divided by those factors
        self._sizes = scaler.log_sizes()
        self._layers = scaler.slots.known[-1]
        self._most = _most_taken(scaler)
        self._room = self._most
        self.stopped = np.zeros(count, dtype=np.bool_)
        self._due = np.zeros(count, dtype=np.bool_)

    @property
    def is_due(self) -> bool:
        """True if the effect on some heads should be checked."""
        return bool(self._due.any())

    def limited(self, factors: Tensor) -> Tensor:
        """Limit the factors, so that their product since the last check is not too small."""
        room = self._room.to(factors.device)  # the model may have moved since an earlier clip
        factors = torch.maximum(factors, room)
        self._room = (room / factors).clamp(max=1.0)
        return factors

    def observe(self, scores: Floats, is_over: NDArray[np.bool_], factors: Floats) -> None:
        """Record the scores of all slots, a mask of those above the threshold, and the factors applied to them."""
        is_early, plain = self._factors > JUDGED_AT**0.5, scores / self._factors
        for largest, counts in ((self._before, is_over & is_early), (self._after, is_over & ~is_early)):
            np.copyto(largest, np.maximum(largest, plain), where=counts)
        self._due |= is_over & (self._factors <= JUDGED_AT)
        self._factors = self._factors * factors

    def judge(self, scaler: HeadScaler) -> NDArray[np.bool_]:
        """Restore the weights of layers whose clips had no effect; return a mask of the slots of these layers."""
        sizes, due = scaler.log_sizes(), self._due
        grown = np.exp(sizes - self._sizes) / self._factors  # by training
        was_over = self._before > 0  # otherwise it was only scaled together with its family
        failed = due & was_over & (self._after >= UNEXPLAINED * self._before * np.maximum(grown, 1.0))
        families, layers = scaler.families.cpu().numpy(), self._layers
        reached = failed
        while True:  # add all slots that share a layer or a family
            more = np.isin(families, families[reached]) | np.isin(layers, layers[reached])
            if (more == reached).all():
                break
            reached = more
        judged = reached | np.isin(families, families[due])
        if reached.any():
            scaler.multiply_(torch.from_numpy(np.where(reached, 1.0 / self._factors, 1.0)).to(scaler.fixed.device))
        self._due = np.zeros_like(due)
        self._sizes = np.where(judged, sizes, self._sizes)
        self._factors, self._before, self._after = (
            np.where(judged, start, now)
            for start, now in ((1.0, self._factors), (0.0, self._before), (0.0, self._after))
        )
        self._room = torch.where(
            torch.from_numpy(judged).to(self._room.device), self._most.to(self._room.device), self._room
        )
        return reached


def _most_taken(scaler: HeadScaler) -> Tensor:
    """Return the smallest factor of each slot that multiplies its weights by no less than LEAST_LEFT."""
    exponents = torch.from_numpy(scaler.slots.known[EXPONENT]).to(scaler.fixed.device)
    least = LEAST_LEFT ** (1.0 / exponents.clamp(min=0.5))
    return torch.zeros_like(least).scatter_reduce_(0, scaler.families, least, "amax")[scaler.families]


class WriteCheck:
    """Checks that clipped parameters keep their new values at the next step.

    An optimiser with copies of the parameters, in float32 or in partitions, writes them back and undoes every clip.
    """

    MOST_ELEMENTS = 512  # compared elements of a parameter
    MOST_TRIES = 16  # steps without a clear result before the check gives up
    CLEARLY = 16.0  # required ratio of squared distances for a clear result

    def __init__(self, model: nn.Module) -> None:
        self._model, self._tries = model, 0
        dtypes = {each.dtype for each in model.parameters() if each.is_floating_point()}
        self._rounding = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        self.is_done, self.is_armed = False, device_of(model).type == "cpu"  # on a GPU, after the first clip
        self._sample: list[tuple[Callable[[], Tensor], Tensor, Tensor]] = []
        self._others: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def before_clip(self, scaler: HeadScaler, factors: Tensor) -> None:
        """Store some elements that the clip will change, and some others to estimate the size of an optimiser step."""
        if self.is_done or not self.is_armed:
            return
        self._sample = scaler.sample(factors)
        self.is_armed = bool(self._sample) or factors.device.type == "cpu"
        if self._sample:
            others = scaler.untouched(self._model)
            self._others = [(each, each.reshape(-1)[: self.MOST_ELEMENTS].double()) for each in others]

    def forget(self) -> None:
        """Drop the stored elements, since a step was not checked."""
        self._sample, self._others = [], []

    @torch.no_grad()
    def votes(self) -> Tensor | None:
        """Return (was undone, is kept) as 0 or 1, both 0 if unclear; None if no elements were stored."""
        if not self._sample:
            return None
        found = torch.zeros(2)
        undone = stayed = gap = whole = 0.0
        for values, before, factors in self._sample:
            now = values()
            undone += float((now - before).square().sum())
            stayed += float((now - before * factors).square().sum())
            gap += float((before - before * factors).square().sum())
            whole += float(before.square().sum())
        step, size = 0.0, 1e-300
        for other, before in self._others:
            step += float((other.reshape(-1)[: self.MOST_ELEMENTS].double() - before).square().sum())
            size += float(before.square().sum())
        self.forget()
        self._tries += 1
        self.is_done = self._tries >= self.MOST_TRIES
        if gap / max(whole, 1e-300) > self.CLEARLY * max(step / size, self._rounding**2):
            found[0] = float(step > 0.0 and self.CLEARLY * undone < stayed)
            found[1] = float(self.CLEARLY * stayed < undone)
        return found
