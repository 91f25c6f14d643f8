"""State of the clips of a model: factors of each head, and checks that clips have an effect and stay."""

import math
from collections.abc import Callable, Iterable, MutableMapping
from weakref import WeakKeyDictionary, WeakMethod

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from attnscale.acting.head_rows import Floats, Head, Mask
from attnscale.acting.scaling import HeadScaler, ScaledParameter, device_of
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
        self.logged: set[tuple[str, str]] = set()  # skipped layers and reasons that were already logged
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
        found = torch.full((2, layer.heads), -torch.inf, dtype=torch.float64)
        measured = layer.measured or (layer.stats,)
        for stats in measured if any(stats in self._used for stats in measured) else (layer.stats,):
            maxima = torch.stack([stats.max, stats.max_bound]).double().cpu()
            maxima[:, sorted(self._used.get(stats, ()))] = -torch.inf
            found = torch.maximum(found, maxima)
        return found

    def note_used(self, layer: Layer, heads: Iterable[int]) -> None:
        """Mark heads as clipped because of this measurement of a layer."""
        for stats in layer.measured or (layer.stats,):
            self._used.setdefault(stats, set()).update(heads)

    def effect_of(self, scaler: HeadScaler) -> "EffectCheck":
        """Return the check of these heads; the same one at every clip."""
        which = (tuple(scaler.rows.heads), scaler.rows.is_fixed.tobytes())
        if which not in self._effects:
            self._effects[which] = EffectCheck(scaler)
        effect = self._effects[which]
        effect.room = effect.room.to(scaler.device)  # the model may have moved since an earlier clip
        return effect


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
        rows, count = scaler.rows, len(scaler.rows.heads)
        self._factors = np.ones(count)  # product of the factors since the last check
        self._before, self._after = np.zeros(count), np.zeros(count)  # largest scores, divided by those factors
        self._sizes = scaler.log_sizes()
        _, self._layers = np.unique([name for name, _ in rows.heads], return_inverse=True)
        exponents = np.full(count, 0.5)
        np.maximum.at(exponents, rows.head[rows.head >= 0], rows.exponent[rows.head >= 0])
        least = np.zeros(count)  # factor of each family that multiplies its weights by no less than LEAST_LEFT
        np.maximum.at(least, rows.families, LEAST_LEFT ** (1.0 / exponents))
        self._least = least[rows.families]
        self.room = torch.from_numpy(self._least).to(scaler.device)  # smallest factor that is still allowed
        self.is_fixed = np.zeros(count, dtype=np.bool_)  # heads that are not clipped, or no longer
        self._due = np.zeros(count, dtype=np.bool_)
        self.stop(rows.is_fixed)

    @property
    def is_due(self) -> bool:
        """True if the effect on some heads should be checked."""
        return bool(self._due.any())

    def stop(self, heads: Mask) -> None:
        """Allow no factor but 1 from now on."""
        self.is_fixed = self.is_fixed | heads
        self._least = np.where(self.is_fixed, 1.0, self._least)
        self.room = torch.where(torch.from_numpy(heads).to(self.room.device), 1.0, self.room)

    def limited(self, factors: Tensor) -> Tensor:
        """Limit the factors, so that their product since the last check is not too small."""
        factors = torch.maximum(factors, self.room)
        self.room = self.room / factors
        return factors

    def observe(self, scores: Floats, is_over: Mask, factors: Floats) -> None:
        """Record the scores of all heads, a mask of those above the threshold, and the factors applied to them."""
        is_early, plain = self._factors > JUDGED_AT**0.5, scores / self._factors
        for largest, counts in ((self._before, is_over & is_early), (self._after, is_over & ~is_early)):
            np.copyto(largest, np.maximum(largest, plain), where=counts)
        self._due |= is_over & (self._factors <= JUDGED_AT)
        self._factors = self._factors * factors

    def judge(self, scaler: HeadScaler) -> Mask:
        """Restore the weights of layers whose clips had no effect; return a mask of their heads."""
        sizes, due = scaler.log_sizes(), self._due
        grown = np.exp(sizes - self._sizes) / self._factors  # by training
        was_over = self._before > 0  # otherwise it was only scaled together with its family
        failed = due & was_over & (self._after >= UNEXPLAINED * self._before * np.maximum(grown, 1.0))
        families, layers = scaler.rows.families, self._layers
        reached = failed
        while True:  # add all heads that share a layer or a family
            more = np.isin(families, families[reached]) | np.isin(layers, layers[reached])
            if (more == reached).all():
                break
            reached = more
        if reached.any():
            scaler.multiply_(torch.from_numpy(np.where(reached, 1.0 / self._factors, 1.0)))
        judged = reached | np.isin(families, families[due])
        self._due = np.zeros_like(due)
        self._sizes[judged] = sizes[judged]
        self._factors[judged] = 1.0
        self._before[judged] = self._after[judged] = 0.0
        room = np.where(judged, self._least, self.room.cpu().numpy())
        self.room = torch.from_numpy(room).to(scaler.device)
        return reached


class WriteCheck:
    """Checks that clipped parameters keep their new values at the next step.

    An optimiser with copies of the parameters, in float32 or in partitions, writes them back and undoes every clip.
    """

    MOST_ELEMENTS = 512  # compared elements of a parameter that is not clipped
    MOST_TRIES = 16  # steps without a clear result before the check gives up
    CLEARLY = 16.0  # required ratio of squared distances for a clear result

    def __init__(self, model: nn.Module) -> None:
        dtypes = {each.dtype for each in model.parameters() if each.is_floating_point()}
        self._rounding = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        self._tries = 0
        # A check waits for the factors of its step, so on a GPU it is made only after a reported clip.
        self.is_armed = device_of(model).type == "cpu"
        self.has_sample = False  # equal on all ranks, also on one that has none of the clipped rows
        self._clipped: list[tuple[ScaledParameter, Tensor, Tensor, Tensor]] = []  # rows, their values, their factors
        self._others: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def before_clip(self, scaler: HeadScaler, factors: Tensor) -> None:
        """Store some elements that the clip will change, and some others to estimate the size of an optimiser step."""
        if not self.is_armed or self._tries >= self.MOST_TRIES:
            return
        self.has_sample = bool((factors != 1.0).any())
        self.is_armed = self.has_sample or factors.device.type == "cpu"
        if self.has_sample:
            changed = scaler.changed(factors)
            self._clipped = [(scaled, rows, scaled.elements(rows), own[:, None]) for scaled, rows, own in changed]
            self._others = [(each, self._first(each)) for each in scaler.untouched()]

    def forget(self) -> None:
        """Drop the stored elements, since a step was not checked."""
        self.has_sample, self._clipped, self._others = False, [], []

    def was_undone(self, scaler: HeadScaler) -> bool:
        """Return True if the stored elements have their values from before the clip; every rank must call it."""
        votes = scaler.replicas.reduced_(torch.tensor(self._votes(), device=scaler.device), "max").tolist()
        self.forget()
        self._tries = self.MOST_TRIES if any(votes) else self._tries + 1
        return votes == [1.0, 0.0]

    @torch.no_grad()
    def _votes(self) -> list[float]:
        """Return (was undone, is kept) as 0 or 1, both 0 if unclear."""
        undone = stayed = gap = whole = step = size = 0.0
        for scaled, rows, before, factors in self._clipped:
            now, after = scaled.elements(rows), before * factors
            undone += _distance(now, before)
            stayed += _distance(now, after)
            gap += _distance(before, after)
            whole += float(before.square().sum())
        for other, before in self._others:
            step += _distance(self._first(other), before)
            size += float(before.square().sum())
        if gap <= self.CLEARLY * whole * max(step / max(size, 1e-300), self._rounding**2):
            return [0.0, 0.0]
        return [float(step > 0.0 and self.CLEARLY * undone < stayed), float(self.CLEARLY * stayed < undone)]

    def _first(self, parameter: Tensor) -> Tensor:
        return parameter.reshape(-1)[: self.MOST_ELEMENTS].double()


def _distance(first: Tensor, second: Tensor) -> float:
    return float((first - second).square().sum())
