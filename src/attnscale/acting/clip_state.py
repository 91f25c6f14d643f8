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

# Whether scores followed is judged when a head is over the threshold again after this much was taken from it.
JUDGED_AT = 1 / 32
# Then scores over the threshold, with the factors counted out, may be this many times what they were before. Data and
# alignment move them by a few times meanwhile; a clip without effect raises them by at least 1 / JUDGED_AT.
UNEXPLAINED = 16.0
LEAST_LEFT = 1e-3  # of the weights of a head, before that was judged


class ClipState:
    """The clips of one model, by whichever function."""

    def __init__(self) -> None:
        self.log_factors: dict[Head, float] = {}  # logarithms of what scores were multiplied by
        self.fetch: WeakMethod[Callable[[], object]] | None = None  # waits for reports from a GPU
        self.said: set[tuple[str, str]] = set()  # layers that were left as they are, and why
        self.stopped: dict[str, str] = {}  # layers that are clipped no more, and why
        self._effects: dict[object, EffectCheck] = {}  # by the heads that are clipped together
        # Heads that were clipped by a measurement: what it says of them is no longer so.
        self._used: MutableMapping[ScoreStats, set[int]] = WeakIdKeyDictionary()

    def note(self, factors: Iterable[tuple[str, int, float]]) -> None:
        """Note what scores of layers and heads were multiplied by."""
        for layer, head, factor in factors:
            self.log_factors[layer, head] = self.log_factors.get((layer, head), 0.0) + math.log(factor)

    def fresh_maxima(self, layer: Layer) -> Tensor:
        """Return the largest score and its bound, (2, heads), over the calls since a head was last clipped, or −∞."""
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
        """Note heads that were clipped by what was measured of a layer."""
        for stats in layer.measured or (layer.stats,):
            self._used.setdefault(stats, set()).update(heads)

    def effect_of(self, scaler: HeadScaler) -> "EffectCheck":
        """Return the check of these heads, which goes on where they were clipped before."""
        which = (tuple(scaler.heads), scaler.slots.count, scaler.slots.own.start)
        if which not in self._effects:
            self._effects[which] = EffectCheck(scaler)
        return self._effects[which]


def _maxima(stats: ScoreStats) -> Tensor:
    return torch.stack([stats.max, stats.max_bound]).double().cpu()


_STATES: WeakKeyDictionary[nn.Module, ClipState] = WeakKeyDictionary()


def clip_state(model: nn.Module) -> ClipState:
    """Return what is known of the clips of a model."""
    return _STATES.setdefault(model, ClipState())


def clip_logs(model: nn.Module) -> dict[Head, float] | None:
    """Return logarithms of what scores were multiplied by, by layer and head, as layers are called in this model.

    None where no clip was ever at work.
    """
    found: dict[Head, float] | None = None
    for clipped, state in list(_STATES.items()):
        before, surplus = ("", None) if clipped is model else (_prefix(clipped, model), _prefix(model, clipped))
        if (before, surplus) == (None, None):
            continue  # another model, whose reports are not waited for
        fetch = None if state.fetch is None else state.fetch()
        if fetch is not None:
            fetch()
        found = {} if found is None else found
        for (layer, head), factor in state.log_factors.items():
            name = f"{before}{layer}" if before is not None else layer.removeprefix(surplus or "")
            found[name, head] = found.get((name, head), 0.0) + factor
    return found


def _prefix(inner: nn.Module, outer: nn.Module) -> str | None:
    """Return the prefix of a model's layer names in another that holds it; None where that does not."""
    found = (without_wrappers(path) for path, module in outer.named_modules() if module is inner)
    path = next(found, None)
    return path if not path else f"{path}."


class EffectCheck:
    """Checks that the scores of clipped heads follow what is taken from their weights.

    They do not where the weights that were scaled are not those that make the scores. A head that is over the threshold
    again is no sign of that, training may have raised it; then its weights have grown, and that is counted out.
    """

    def __init__(self, scaler: HeadScaler) -> None:
        count = scaler.slots.count
        self._factors = np.ones(count)  # product of the factors since scores were last judged
        self._before, self._after = np.zeros(count), np.zeros(count)  # largest scores, without those factors
        self._sizes = scaler.log_sizes()
        self._layers = scaler.slots.known[-1]
        self._most = _most_taken(scaler)
        self._room = self._most
        self.stopped = np.zeros(count, dtype=np.bool_)
        self._due = np.zeros(count, dtype=np.bool_)

    @property
    def is_due(self) -> bool:
        """True if some heads are to be judged."""
        return bool(self._due.any())

    def limited(self, factors: Tensor) -> Tensor:
        """Return factors that take no more from a head than may be taken before it is judged."""
        room = self._room.to(factors.device)  # the model may have moved since an earlier clip
        factors = torch.maximum(factors, room)
        self._room = (room / factors).clamp(max=1.0)
        return factors

    def observe(self, scores: Floats, is_over: NDArray[np.bool_], factors: Floats) -> None:
        """Note the scores of all slots, which of them are to be clipped, and the factors that they were given."""
        is_early, plain = self._factors > JUDGED_AT**0.5, scores / self._factors
        for largest, counts in ((self._before, is_over & is_early), (self._after, is_over & ~is_early)):
            np.copyto(largest, np.maximum(largest, plain), where=counts)
        self._due |= is_over & (self._factors <= JUDGED_AT)
        self._factors = self._factors * factors

    def judge(self, scaler: HeadScaler) -> NDArray[np.bool_]:
        """Return the slots whose layers are to be clipped no more; what was taken from them was given back."""
        sizes, due = scaler.log_sizes(), self._due
        grown = np.exp(sizes - self._sizes) / self._factors  # by training
        was_over = self._before > 0  # else it was scaled with its family alone until now
        failed = due & was_over & (self._after >= UNEXPLAINED * self._before * np.maximum(grown, 1.0))
        families, layers = scaler.families.cpu().numpy(), self._layers
        reached = failed
        while True:  # what shares a layer or a family with them
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
    """Return the least factor of each slot that leaves LEAST_LEFT of all weights that make it."""
    exponents = torch.from_numpy(scaler.slots.known[EXPONENT]).to(scaler.fixed.device)
    least = LEAST_LEFT ** (1.0 / exponents.clamp(min=0.5))
    return torch.zeros_like(least).scatter_reduce_(0, scaler.families, least, "amax")[scaler.families]


class WriteCheck:
    """Checks that what a clip wrote to parameters is still there at the next step.

    An optimiser with copies of the parameters, in float32 or in partitions, writes them back and undoes every clip.
    """

    MOST_ELEMENTS = 512  # of a parameter
    MOST_TRIES = 16  # steps that told nothing
    CLEARLY = 16.0  # times nearer, in squares

    def __init__(self, model: nn.Module) -> None:
        self._model, self._tries = model, 0
        dtypes = {each.dtype for each in model.parameters() if each.is_floating_point()}
        self._rounding = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        self.is_done, self.is_armed = False, device_of(model).type == "cpu"  # elsewhere once something was clipped
        self._sample: list[tuple[Callable[[], Tensor], Tensor, Tensor]] = []
        self._others: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def before_clip(self, scaler: HeadScaler, factors: Tensor) -> None:
        """Remember some of what will be written, and some other elements, which tell how far a step goes."""
        if self.is_done or not self.is_armed:
            return
        self._sample = scaler.sample(factors)
        self.is_armed = bool(self._sample) or factors.device.type == "cpu"
        if self._sample:
            others = scaler.untouched(self._model)
            self._others = [(each, each.reshape(-1)[: self.MOST_ELEMENTS].double()) for each in others]

    def forget(self) -> None:
        """Forget what was remembered: a step went by that was not looked at."""
        self._sample, self._others = [], []

    @torch.no_grad()
    def votes(self) -> Tensor | None:
        """Return (is undone, is there) as 0 or 1, both 0 where that is not clear; None where nothing was looked at."""
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
