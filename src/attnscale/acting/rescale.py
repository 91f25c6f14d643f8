"""The scale a model applies, folded into its projections."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnscale.acting.clip import heads_of
from attnscale.acting.head_rows import Head, HeadRows, SkippedHead, Touched
from attnscale.acting.parameters import Frozen, check_frozen, refuse_foreign_parameters
from attnscale.acting.replicas import Replicas
from attnscale.acting.scaling import HeadScaler
from attnscale.declared.declaration import note_folded
from attnscale.errors import InputError, SettingError
from attnscale.module_paths import modules_by_path
from attnscale.plain import printable
from attnscale.rules import about_rule, get_rule
from attnscale.rules.apply import Scale, apply_scale
from attnscale.watching import watch
from attnscale.watching.layer import Layer
from attnscale.watching.seen import Seen

UNIT_SPREAD = 1e-3  # tolerance of a calibrated spread
MOST_PASSES = 12  # rescaling one layer changes the scores of later layers, less in each pass


@dataclass(frozen=True)
class RescaledHead:
    """A head whose scores were multiplied by `factor`, through rows of parameters.

    `before` and `after` are the effective scale for rescale_(), and the spread of the scores for calibrate_().
    """

    layer: str
    head: int
    before: float
    after: float
    factor: float
    touched: tuple[Touched, ...]

    def __str__(self) -> str:
        told = f"{self.layer}, head {self.head}: {self.before:.4g} to {self.after:.4g}, times {self.factor:.4g}"
        return printable(told)


@dataclass(frozen=True)
class RescaleReport:
    """Rescaled heads with factor and parameters, and the heads that could not be rescaled."""

    heads: tuple[RescaledHead, ...]
    left: tuple[SkippedHead, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{len(self.heads)} head{'s' * (len(self.heads) != 1)} rescaled" + (":" if self.heads else "")]
        for head in self.heads:
            lines += [f"  {head}", *(f"    {touched}" for touched in head.touched)]
        return "\n".join([*lines, *(f"  {left}" for left in self.left)])


def rescale_(model: nn.Module, rule: Scale, batch: Any = None, *, frozen: Frozen = "keep") -> RescaleReport:
    """Make every attention of the model apply the scale of a rule: `inverse_sqrt`, `constant(0.1)`, 0.1, `"unscaled"`.

    The code of the model keeps its own multiplier; the ratio to the wanted scale is folded into the weights that
    produce queries and keys, so a second call multiplies the weights again. The rule must give one number per head
    dimension: a learned rule, or one that depends on the tensors, cannot be folded.

    The model is called on `batch` to measure its present scale: pass keyword arguments as a dict, several arguments as
    a tuple, or None for Hugging Face's models and nn.MultiheadAttention. Parameters with requires_grad=False are not
    changed, unless `frozen="write"`.

    >>> layer = nn.MultiheadAttention(64, 2, batch_first=True)
    >>> report = rescale_(layer, "unscaled")
    >>> [round(head.before**-2) for head in report.heads], [round(head.after, 6) for head in report.heads]
    ([32, 32], [1.0, 1.0])
    """
    check_frozen(frozen)
    refuse_foreign_parameters(model)
    batch = _example(model) if batch is None else batch
    before = _watched(model, batch)
    scales = {name: _constant(rule, layer.head_dim) for name, layer in before.layers.items()}
    wanted = _ratios(before, lambda layer: torch.full((layer.heads,), scales[layer.name]), lambda layer: layer.scales)
    folded, left = _multiply(model, before.layers, wanted, frozen)
    _note_folded(model, before.layers, {head: factor for head, (factor, _) in folded.items()})
    heads = []
    for (name, head), (factor, touched) in folded.items():
        was = float(before.layers[name].scales[head])
        heads.append(RescaledHead(name, head, was, was * factor, factor, touched))
    return RescaleReport(tuple(heads), tuple(left))


def calibrate_(model: nn.Module, batch: Any, *, frozen: Frozen = "keep") -> RescaleReport:
    """Scale the weights of each head so that its scores on this batch have a standard deviation of one.

    Use it at initialisation: dividing by √d_k gives unit spread only if queries and keys have unit variance. The model
    runs several times without dropout, since rescaling one layer changes the scores of later layers. `batch` and
    `frozen` as in rescale_(). Heads that share weights for their queries, such as the gain of a QK-norm, get unit
    spread on average.

    >>> layer = nn.MultiheadAttention(64, 2, batch_first=True)
    >>> x = torch.randn(4, 50, 64)
    >>> report = calibrate_(layer, (x, x, x))
    >>> [round(head.after, 2) for head in report.heads]
    [1.0, 1.0]
    """
    check_frozen(frozen)
    refuse_foreign_parameters(model)
    with _evaluating(model):
        before = after = _watched(model, batch, rows=None)
        left: list[SkippedHead] = []
        touched: dict[Head, tuple[Touched, ...]] = {}
        factors: dict[Head, float] = {}
        for _ in range(MOST_PASSES):
            wanted = _ratios(after, lambda layer: torch.ones(layer.heads), lambda layer: layer.stats.std)
            wanted = {head: factor for head, factor in wanted.items() if abs(factor - 1) > UNIT_SPREAD / 2}
            if not wanted:
                break
            folded, left = _multiply(model, after.layers, wanted, frozen)
            if not folded:
                break
            for each, (factor, changes) in folded.items():
                touched[each] = _compounded(touched.get(each, ()), changes)
                factors[each] = factors.get(each, 1.0) * factor
            after = _watched(model, batch, rows=None)
    _note_folded(model, before.layers, factors)
    heads = []
    for (name, head), changes in sorted(touched.items()):
        was, now = (float(seen.layers[name].stats.std[head]) for seen in (before, after))
        heads.append(RescaledHead(name, head, was, now, factors[name, head], changes))
    return RescaleReport(tuple(heads), tuple(left))


def _multiply(
    model: nn.Module, layers: Mapping[str, Layer], wanted: Mapping[Head, float], frozen: Frozen
) -> tuple[dict[Head, tuple[float, tuple[Touched, ...]]], list[SkippedHead]]:
    """Multiply the scores of these heads; heads of one family get the geometric mean of their factors.

    Return the factor and the changed rows of each head, and the heads that could not be multiplied.
    """
    rows = HeadRows(model, heads_of(layers), frozen)
    scaler = HeadScaler(model, rows, Replicas())
    logs = np.log([wanted.get(head, 1.0) for head in rows.heads])
    means = np.bincount(rows.families, logs) / np.bincount(rows.families)
    factors = np.where(rows.is_fixed, 1.0, np.exp(means[rows.families]))
    scaler.multiply_(torch.from_numpy(factors).to(scaler.device))
    skipped = [number for number, head in enumerate(rows.heads) if head in wanted and rows.is_fixed[number]]
    left = [SkippedHead(*rows.heads[number], rows.why_fixed(number)) for number in skipped]
    touched = rows.touched(factors).items()
    return {rows.heads[number]: (float(factors[number]), changes) for number, changes in touched}, left


def _watched(model: nn.Module, batch: Any, rows: int | None = 64) -> Seen:
    with torch.no_grad(), watch(model, rows=rows) as seen:
        if isinstance(batch, Mapping):
            model(**batch)
        elif isinstance(batch, tuple | list):
            model(*batch)
        else:
            model(batch)
    return seen


def _example(model: nn.Module) -> Any:
    """Return example inputs for a model that defines them; raise InputError otherwise."""
    if isinstance(model, nn.MultiheadAttention):
        weight = next(model.parameters())
        sizes = (model.embed_dim, model.kdim or model.embed_dim, model.vdim or model.embed_dim)
        return tuple(torch.randn(2, 8, size, device=weight.device, dtype=weight.dtype) for size in sizes)
    inputs = getattr(model, "dummy_inputs", None)
    if isinstance(inputs, Mapping) and inputs:
        device = next(model.parameters()).device
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    raise InputError(
        f"Expected a batch to call {type(model).__name__} on, to see what scale it applies; "
        "call rescale_(model, rule, batch)."
    )


def _constant(rule: Scale, head_dim: int) -> float:
    """Return the scale of a rule for this head dimension; refuse a rule without a constant scale."""
    if isinstance(rule, Tensor | nn.Module | type):
        raise SettingError(f"Expected a rule that is one number, got {type(rule).__name__}, which learns or varies.")
    chosen = get_rule(rule) if isinstance(rule, str) else rule
    known = None if chosen is None or isinstance(chosen, float | int) else about_rule(chosen)
    ones = torch.ones(1, 1, 2, head_dim)
    if not (known is not None and known.needs_visible):
        query, key, scale = apply_scale(chosen, ones, ones, lambda: None)
        if query is ones and key is ones and scale > 0:
            return float(scale)
    raise SettingError(
        f"Expected a rule that is one positive number for a head dimension, got {rule!r}, which looks at tensors; "
        "use it in attnscale.attention or attnscale.MultiheadAttention, or calibrate_(model, batch)."
    )


def _ratios(seen: Seen, wanted: Callable[[Layer], Tensor], found: Callable[[Layer], Tensor]) -> dict[Head, float]:
    """Return the factor of each head to rescale, without heads that are correct or have no measured value."""
    ratios = {}
    for name, layer in seen.layers.items():
        for head, ratio in enumerate((wanted(layer).double() / found(layer).double().cpu()).tolist()):
            if 0 < ratio < math.inf and not math.isclose(ratio, 1.0, rel_tol=1e-7):
                ratios[name, head] = ratio
    return ratios


def _note_folded(model: nn.Module, layers: Mapping[str, Layer], factors: Mapping[Head, float]) -> None:
    """Record the folded factor on each module, as the mean over its heads, so that an audit can find it."""
    by_module: dict[int, tuple[nn.Module, list[float]]] = {}
    modules = modules_by_path(model)
    for (name, _), factor in factors.items():
        module = modules.get(layers[name].module, modules[""])  # the model itself is shown by its class
        by_module.setdefault(id(module), (module, []))[1].append(factor)
    for module, each in by_module.values():
        note_folded(module, math.exp(sum(map(math.log, each)) / len(each)))


def _compounded(first: tuple[Touched, ...], second: tuple[Touched, ...]) -> tuple[Touched, ...]:
    """Combine successive changes of the same rows into one."""
    changes = {(each.parameter, each.rows): each for each in first}
    for each in second:
        earlier = changes.get((each.parameter, each.rows))
        factor = each.factor if earlier is None else each.factor * earlier.factor
        changes[each.parameter, each.rows] = replace(each, factor=factor)
    return tuple(changes.values())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
