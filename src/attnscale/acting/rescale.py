"""The scale a model applies, folded into its projections."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnscale.acting.head_rows import Floats, SkippedHead, Touched, report_text
from attnscale.acting.parameters import Frozen, check_frozen, refuse_foreign_parameters
from attnscale.acting.replicas import Replicas, heads_of
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

SAME_SCALE = 1e-7  # relative; a head that differs by less is not rescaled
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
        return report_text("rescaled", self.heads, self.left)


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
    layers = _watched(model, _example(model) if batch is None else batch).layers
    scales = [np.full(layer.heads, _constant(rule, layer.head_dim)) for layer in layers.values()]
    scaler = HeadScaler(model, heads_of(layers), frozen, Replicas())
    before = _by_head(layer.scales for layer in layers.values())
    wanted = _ratios(np.concatenate(scales), before, SAME_SCALE)
    factors = _multiply(scaler, wanted)
    return _report(model, layers, scaler, wanted, factors, before, before * factors)


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
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        layers = _watched(model, batch, rows=None).layers
        scaler = HeadScaler(model, heads_of(layers), frozen, Replicas())
        before = after = _by_head(layer.stats.std for layer in layers.values())
        total = np.ones(len(before))
        for _ in range(MOST_PASSES):
            wanted = _ratios(1.0, after, UNIT_SPREAD / 2)
            factors = _multiply(scaler, wanted)
            if (factors == 1.0).all():
                break
            total *= factors
            now = _watched(model, batch, rows=None).layers
            after = _by_head(now[name].stats.std for name in layers)
    finally:
        for module, training in modes:
            module.training = training
    return _report(model, layers, scaler, wanted, total, before, after)


def _by_head(values: Iterable[Tensor]) -> Floats:
    """Concatenate the values of all layers, one per head."""
    return np.concatenate([np.zeros(0), *(each.double().cpu().numpy() for each in values)])


def _ratios(wanted: Floats | float, found: Floats, tolerance: float) -> Floats:
    """Return the factor of each head; 1 for heads that are correct or have no measured value."""
    with np.errstate(all="ignore"):
        ratios = wanted / found
        return np.where(np.isfinite(ratios) & (ratios > 0) & (np.abs(ratios - 1.0) > tolerance), ratios, 1.0)


def _multiply(scaler: HeadScaler, wanted: Floats) -> Floats:
    """Multiply the scores of each head; return the factors, the geometric mean for heads of one family."""
    rows = scaler.rows
    means = np.bincount(rows.families, np.log(wanted)) / np.bincount(rows.families).clip(1)
    factors = np.where(rows.is_fixed, 1.0, np.exp(means[rows.families]))
    scaler.multiply_(torch.from_numpy(factors))
    return factors


def _report(
    model: nn.Module,
    layers: Mapping[str, Layer],
    scaler: HeadScaler,
    wanted: Floats,
    factors: Floats,
    before: Floats,
    after: Floats,
) -> RescaleReport:
    rows = scaler.rows
    heads = []
    for number, touched in rows.touched(factors).items():
        values = float(before[number]), float(after[number]), float(factors[number])
        heads.append(RescaledHead(*rows.heads[number], *values, touched))
    _note_folded(model, layers, heads)
    skipped = np.flatnonzero((wanted != 1.0) & rows.is_fixed).tolist()
    left = [SkippedHead(*rows.heads[number], rows.why_fixed(number)) for number in skipped]
    return RescaleReport(tuple(heads), tuple(left))


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
        f"Expected a batch to call {type(model).__name__} on, to measure the scale that it applies; "
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


def _note_folded(model: nn.Module, layers: Mapping[str, Layer], heads: Sequence[RescaledHead]) -> None:
    """Record the folded factor on each module, as the mean over its heads, so that an audit can find it."""
    by_module: dict[int, tuple[nn.Module, list[float]]] = {}
    modules = modules_by_path(model)
    for head in heads:
        module = modules.get(layers[head.layer].module, modules[""])  # the model itself is shown by its class
        by_module.setdefault(id(module), (module, []))[1].append(math.log(head.factor))
    for module, logs in by_module.values():
        note_folded(module, math.exp(sum(logs) / len(logs)))
