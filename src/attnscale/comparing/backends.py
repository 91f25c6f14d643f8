"""compare_backends: run one model with each of its attention implementations, on the same batch.

transformers sets the implementation (`set_attn_implementation`), as in a user's own run.
"""

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from attnscale.comparing.backend_comparison import BackendComparison, BackendDifference, BackendLayer
from attnscale.comparing.comparison import and_more
from attnscale.comparing.visible import VisibleKeys, differences
from attnscale.declared import Authority
from attnscale.diagnose.auditing import tensors_in
from attnscale.errors import ModelError, SettingError
from attnscale.loading.model_errors import describe, quiet
from attnscale.module_paths import modules_by_path
from attnscale.numerics import HALF_DTYPES
from attnscale.plain import readable
from attnscale.watching.layer import Layer
from attnscale.watching.watch import watched
from attnscale.watching.watcher import Settings

Recorded: TypeAlias = dict[str, list[tuple[Tensor | None, Tensor | None]]]
NAMES = {"flex": "flex_attention", "flash": "flash_attention_2"}  # names in transformers
SAME_SCALE = 0.02  # relative tolerance; the scale is fitted to scores in half precision
# Tolerance relative to the norm of an output. Kernels differ in their order of summation: on small models the outputs
# differ by 1e-6 in float32 and 5e-3 in bfloat16.
SAME_OUTPUT, SAME_HALF_OUTPUT = 1e-3, 0.03


@dataclass(frozen=True)
class _Run:
    """One backend's layers, and the inputs and outputs of their modules."""

    backend: str
    layers: Mapping[str, Layer]
    tensors: Recorded

    def tensors_of(self, layer: Layer) -> tuple[Tensor | None, Tensor | None]:
        """Return the input and the output of the layer's module; if the module runs repeatedly, those of this run."""
        runs = self.tensors.get(layer.module, [])
        depth = layer.name.rpartition("[")[2].rstrip("]") if layer.name.endswith("]") else "0"
        return runs[int(depth)] if int(depth) < len(runs) else (None, None)


def compare_backends(
    model: nn.Module, batch: Any, backends: Sequence[str] = ("eager", "sdpa"), *, rows: int | None = None
) -> BackendComparison:
    """Run a transformers model with each attention implementation, and compare every layer with the first one.

    All runs use the same weights and batch: a tensor, a tuple of arguments, or a mapping of keyword arguments. Runs are
    in evaluation mode, because dropout is random; the mode and the implementation are restored afterwards. Layers are
    compared by scale, soft-cap, visible keys, sinks and output. `flex` and `flash` are short names; all other names
    of transformers are accepted too. `unavailable` lists the backends that cannot run, with the reason. `rows` is the
    number of sampled rows per head (None: all).
    """
    names = require_backends(backends)
    if not isinstance(model, nn.Module) or not hasattr(model, "set_attn_implementation"):
        raise SettingError(
            "Expected a transformers model, whose attention implementation can be set, got "
            f"{type(model).__name__}: give one with set_attn_implementation()."
        )
    ran: list[_Run] = []
    unavailable: dict[str, str] = {}
    with _in_evaluation_mode(model):
        for name in names:
            try:
                # copy the inputs, because a cache in them grows in each run
                ran.append(_run(model, name, copy.deepcopy(batch), rows))
            except Exception as error:  # a backend that is missing or not supported may raise anything
                unavailable[name] = _reason(error)
    found = [row for name in (ran[0].layers if ran else ()) for row in _compared(name, ran)]
    return BackendComparison(tuple(run.backend for run in ran), unavailable, tuple(found), tuple(_notes(ran)))


def require_backends(backends: Sequence[str]) -> tuple[str, ...]:
    """Return the backends without duplicates; raise an error for fewer than two."""
    if isinstance(backends, str):
        raise SettingError(f'Expected several backends, as in ("eager", "sdpa"), got {backends!r}.')
    names = tuple(dict.fromkeys(backends))
    if len(names) < 2:
        raise SettingError(f"Expected two backends or more, as in eager,sdpa, got {', '.join(names) or 'none'}.")
    return names


@contextmanager
def _in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode; on exit, restore the modes and the attention implementation of every configuration."""
    modes = {module: module.training for module in model.modules()}
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    before = [(config, getattr(config, "_attn_implementation", None)) for config in configs.values()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training
        for config, implementation in before:
            if getattr(config, "_attn_implementation", None) != implementation:
                config._attn_implementation = implementation


def _run(model: Any, name: str, batch: Any, rows: int | None) -> _Run:
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
    args = args if isinstance(args, tuple | list) else (args,)
    with quiet(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # from the model's own code; users see them outside a comparison
        model.set_attn_implementation(NAMES.get(name, name))
        with _recorded(model) as tensors, watched(model, Settings(rows, keep=True, may_be_empty=True)) as seen:
            model(*args, **kwargs)
    if not seen.layers:
        raise ModelError("no attention could be read from its run")
    return _Run(name, seen.layers, tensors)


@contextmanager
def _recorded(model: nn.Module) -> Iterator[Recorded]:
    """Record the first input and the first output of every module with "att" in its name or class."""
    found: Recorded = {}
    handles = []
    for path, module in modules_by_path(model).items():
        if "att" not in f"{path.rpartition('.')[2]} {type(module).__name__}".lower():
            continue

        def record(_: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            pair = _first_tensor((*args, *kwargs.values())), _first_tensor(output)
            found.setdefault(path, []).append(pair)

        handles.append(module.register_forward_hook(record, with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _first_tensor(value: Any) -> Tensor | None:
    """Return a copy of the first floating-point tensor; a later operation may overwrite the original."""
    return next((each.detach().clone() for each in tensors_in(value) if each.is_floating_point()), None)


def _compared(name: str, ran: Sequence[_Run]) -> Iterator[BackendLayer]:
    """Yield the layer of each run, with its differences from the first run."""
    first, one = ran[0], ran[0].layers[name]
    visible = VisibleKeys.of(one)
    yield _row(first.backend, one, visible)
    for run in ran[1:]:
        if name not in run.layers:
            continue
        other = run.layers[name]
        keys = VisibleKeys.of(other)
        inputs, outputs = (
            _change(*pair, one, other) for pair in zip(first.tensors_of(one), run.tensors_of(other), strict=True)
        )
        found = list(_score_differences(one, other, first.backend))
        if visible is not None and keys is not None:
            found += [BackendDifference("visible keys", each) for each in differences(visible, keys, first.backend)]
        same = SAME_HALF_OUTPUT if one.dtype in HALF_DTYPES else SAME_OUTPUT
        if not found and not inputs > same and not outputs <= same and not math.isnan(outputs):
            found.append(BackendDifference("output", _output_message(outputs)))
        yield _row(run.backend, other, keys, inputs, outputs, tuple(found))


def _row(backend: str, layer: Layer, visible: VisibleKeys | None, *changes: Any) -> BackendLayer:
    sinks = None if layer.sinks is None else float(layer.sinks.max())
    keys = float(layer.stats.keys.double().nanmean()) if visible is None else visible.mean
    return BackendLayer(layer.name, backend, layer.kind, layer.scale_applied, layer.softcap, keys, sinks, *changes)


def _output_message(change: float) -> str:
    size = "is NaN elsewhere" if math.isinf(change) else f"differs by {change:.1%} of its length"
    return f"its output {size}, with the same scale, soft-cap, visible keys and sinks: check the code after the softmax"


def _change(one: Tensor | None, other: Tensor | None, first: Layer, second: Layer) -> float:
    """Return the relative change of a tensor, without padding; infinite if only one of the two is finite."""
    if one is None or other is None or one.shape != other.shape:
        return math.nan
    one, other = one.double(), other.double()
    for layer in (first, second):
        padding = next((each for each in layer.left_out if each.shape == one.shape[:2]), None)
        if padding is not None:
            is_padding = padding.to(one.device)[(...,) + (None,) * (one.dim() - 2)]
            one, other = one.masked_fill(is_padding, 0.0), other.masked_fill(is_padding, 0.0)
    if not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    one, other = one.nan_to_num(0.0, 0.0, 0.0), other.nan_to_num(0.0, 0.0, 0.0)
    return float((other - one).norm() / one.norm().clamp(min=1e-300))


def _score_differences(one: Layer, other: Layer, name: str) -> Iterator[BackendDifference]:
    """Yield how the scores of `other` differ from those of `one`, the run of backend `name`."""
    here, there = other.scales.double().cpu(), one.scales.double().cpu()
    finite = here.isfinite() & there.isfinite() if here.shape == there.shape else torch.zeros(1, dtype=torch.bool)
    if finite.any() and not torch.allclose(here[finite], there[finite], rtol=SAME_SCALE, atol=0):
        yield BackendDifference("scale", _scale_message(one, other, name))
    caps = [math.inf if layer.softcap is None else layer.softcap for layer in (other, one)]
    if not math.isclose(*caps, rel_tol=SAME_SCALE):
        ours, theirs = ("no soft-cap" if math.isinf(cap) else f"a soft-cap of {cap:g}" for cap in caps)
        yield BackendDifference("soft-cap", f"it applies {ours}, {name} applies {theirs}")
    sinks = [layer.sinks for layer in (other, one) if layer.sinks is not None]
    if len(sinks) == 1:
        ours, theirs = ("a sink", "no sink") if one.sinks is None else ("no sink", "a sink")
        yield BackendDifference("sinks", f"it has {ours} beside the keys, {name} has {theirs}")
    elif sinks:
        own, first = (each.double().cpu() for each in sinks)
        if not torch.allclose(own, first, rtol=SAME_SCALE, atol=SAME_SCALE):
            yield BackendDifference("sinks", f"its sinks have other scores than those of {name}")


def _scale_message(one: Layer, other: Layer, name: str) -> str:
    message = f"it multiplies q·k by {readable(other.scale_applied, 4)}, {name} by {readable(one.scale_applied, 4)}"
    declared = one.declared
    if declared.scale is None or declared.scale_authority is not Authority.CONFIGURED:
        return message
    right, wrong = (math.isclose(each.scale_applied, declared.scale, rel_tol=SAME_SCALE) for each in (one, other))
    if right == wrong:
        return message
    culprit = "it ignores the scale" if right else f"{name} ignores the scale"
    return f"{message}, and {declared.scale_source} asks for {readable(declared.scale, 4)}: {culprit}"


def _notes(ran: Sequence[_Run]) -> Iterator[str]:
    for run in ran[1:]:
        for one, other in ((ran[0], run), (run, ran[0])):
            alone = [name for name in one.layers if name not in other.layers]
            if alone:
                yield f"{one.backend} ran the layer {and_more(alone)}, and {other.backend} did not: not compared."
        unread = [name for name, layer in run.layers.items() if layer.reading.unread]
        if unread:
            yield f"The scale of {', '.join(unread)} could not be read under {run.backend}."
        unknown = [name for name, layer in run.layers.items() if VisibleKeys.of(layer) is None]
        if unknown:
            yield f"The visible keys of {', '.join(unknown)} are not known under {run.backend}."


def _reason(error: Exception) -> str:
    """Return the first sentence of an error of transformers, else the error with its location."""
    first = " ".join(str(error).split()).split(". ")[0].rstrip(".")
    return first if isinstance(error, ImportError | ModelError) or "does not support" in first else describe(error)
