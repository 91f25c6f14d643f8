"""Profiles: statistics of every head of a model on each sample, for comparison with another model.

`attnscale check --save` writes a profile to a file; `--against` and `attnscale compare` read it.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attnscale.comparing.visible import VisibleKeys
from attnscale.diagnose import Audit
from attnscale.diagnose.auditing import tensors_in
from attnscale.diagnose.finding import SEVERITIES, Finding
from attnscale.errors import SettingError
from attnscale.files import read_whole, write_whole
from attnscale.loading.inputs import map_tensors
from attnscale.measure.statistics import STATISTICS
from attnscale.module_paths import without_wrappers
from attnscale.plain import json_text, plain, rounded
from attnscale.watching.layer import Layer
from attnscale.watching.watch import watched
from attnscale.watching.watcher import Settings

Numbers = NDArray[np.float64]
Call = tuple[tuple[Any, ...], dict[str, Any]]

# Statistics compared as ratios. Shares, between 0 and 1, are compared as differences.
RATIOS = ("spread", "scale_applied", "query_norm", "key_norm", "alignment", "query_gradient", "key_gradient")
SHARES = ("entropy_ratio", "jacobian_trace")
COMPARED = (*RATIOS[:5], *SHARES, *RATIOS[5:])
OF_STATS = ("spread", *SHARES)
OF_LAYERS = {"scale_applied": "scales", "query_norm": "query_norm", "key_norm": "key_norm", "alignment": "alignment"}
ONE_SEQUENCE = "The model was run on one sequence, so changes have no error. Use a batch of several sequences."
KIND, VERSION = "attnscale check", 2  # identify a file of profiles
DIGITS = 8  # significant digits in a file; an unchanged model reproduces all of them
MAX_BYTES = 2**28  # 100 times the size of a profile of 100 layers with 128 heads


@dataclass(frozen=True)
class LayerProfile:
    """Statistics of one layer: arrays (samples, heads) by name, with NaN for a missing value."""

    samples: Mapping[str, Numbers]
    weights: str = ""  # digest of the attention module's parameters; empty: unknown
    visible: str = ""  # digest of the visible keys of each query; empty: unknown

    @property
    def heads(self) -> int:
        """Number of heads."""
        return next((int(numbers.shape[1]) for numbers in self.samples.values()), 0)

    @property
    def count(self) -> int:
        """Number of samples."""
        return next((int(numbers.shape[0]) for numbers in self.samples.values()), 0)


@dataclass(frozen=True)
class Profile:
    """Profile of a model on several sequences, or of the latest records of a run."""

    title: str
    fed: str  # description of the samples
    layers: Mapping[str, LayerProfile]
    findings: tuple[Finding, ...] = ()
    inputs: str = ""  # digest of the inputs; samples of equal inputs are compared in pairs
    notes: tuple[str, ...] = ()


def measure_profile(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    audit: Audit,
    *,
    title: str,
    fed: str,
    rows: int | None = None,
) -> Profile:
    """Run every sequence of the batch alone, with `rows` rows per head (None: all); `audit` covers the whole batch."""
    calls = _split((tuple(args), dict(kwargs)))
    runs = [_watch(model, call, rows) for call in calls]
    if len(calls) > 1 and not _are_parts_of(audit.layers, runs):
        calls = [(tuple(args), dict(kwargs))]
        runs = [_watch(model, calls[0], rows)]
    weights = _weights_digests(model, runs[0])
    keys = {name: VisibleKeys.of(layer) for name, layer in audit.layers.items()}
    visible = {name: "" if found is None else found.digest for name, found in keys.items()}
    layers = {
        name: _layer([run[name] for run in runs if name in run], weights[name], visible.get(name, ""))
        for name in runs[0]
    }
    notes = (ONE_SEQUENCE,) if len(calls) == 1 else ()
    inputs = _digest({f"{number}": tensor for number, tensor in enumerate(tensors_in(calls))})
    return Profile(title, fed, layers, tuple(audit.findings), inputs, notes)


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON."""
    write_whole(path, json_text(_to_dict(profile)) + "\n")


def read_profile(path: Path) -> Profile:
    """Read the profile in a file."""
    try:
        return _from_dict(json.loads(read_whole(path, MAX_BYTES).decode("utf-8")))
    except OSError as error:
        raise SettingError(f"Could not read {path}: {error.strerror or error}.") from None
    except SettingError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error).split("\n")[0].rstrip(".")
        raise SettingError(
            f"Expected a check saved by `check --save` in {path}, but it is damaged: {reason}."
        ) from None


def is_saved(path: Path) -> bool:
    """Return True if the file begins like a saved check, and not like a model's config.json."""
    try:
        with path.open("rb") as file:
            return json.dumps(KIND).encode() in file.read(64)
    except OSError:
        return False


def _to_dict(profile: Profile) -> dict[str, Any]:
    layers = {}
    for name, layer in profile.layers.items():
        rows = {
            each: [[rounded(value, DIGITS) for value in row] for row in layer.samples[each]] for each in layer.samples
        }
        layers[name] = vars(layer) | {"samples": rows}
    findings = [finding.to_dict() for finding in profile.findings]
    found: dict[str, Any] = plain(
        {"kind": KIND, "version": VERSION} | vars(profile) | {"findings": findings, "layers": layers}
    )
    return found


def _from_dict(saved: Any) -> Profile:
    """Return the profile in a saved dict; raise ValueError, TypeError or KeyError if it is damaged."""
    if not isinstance(saved, dict) or saved.get("kind") != KIND:
        raise ValueError(f"there is no kind {KIND!r}")
    if saved["version"] != VERSION:
        raise ValueError(f"expected version {VERSION}, got {saved['version']!r}")
    findings = tuple(Finding(**finding) for finding in saved.get("findings", ()))
    if not {finding.severity for finding in findings} <= set(SEVERITIES):
        raise ValueError("a finding has an unknown severity")
    layers = {
        name: LayerProfile(
            _samples(name, layer["samples"]), str(layer.get("weights", "")), str(layer.get("visible", ""))
        )
        for name, layer in saved["layers"].items()
    }
    notes = tuple(map(str, saved.get("notes", ())))
    return Profile(str(saved["title"]), str(saved["fed"]), layers, findings, str(saved["inputs"]), notes)


def _samples(name: str, saved: dict[str, Any]) -> dict[str, Numbers]:
    samples = {each: np.array(numbers, dtype=np.float64) for each, numbers in saved.items() if each in COMPARED}
    shapes = {numbers.shape for numbers in samples.values()}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 2 or 0 in shape:
        raise ValueError(f"the samples of the layer {name!r} are not (samples, heads) for every statistic")
    if any(np.isinf(numbers).any() for numbers in samples.values()):
        raise ValueError(f"a sample of the layer {name!r} is infinite")
    return samples


def _watch(model: nn.Module, call: Call, rows: int | None) -> Mapping[str, Layer]:
    with warnings.catch_warnings(), torch.no_grad(), watched(model, Settings(rows, may_be_empty=True)) as run:
        warnings.simplefilter("ignore")  # the audit already showed them
        model(*call[0], **call[1])
    return run.layers


def _layer(runs: Sequence[Layer], weights: str, visible: str) -> LayerProfile:
    numbers = {name: [STATISTICS[name].of(layer.stats) for layer in runs] for name in OF_STATS}
    numbers |= {name: [getattr(layer, attribute) for layer in runs] for name, attribute in OF_LAYERS.items()}
    return LayerProfile(
        {name: np.stack([each.detach().double().cpu().numpy() for each in values]) for name, values in numbers.items()},
        weights,
        visible,
    )


def _are_parts_of(whole: Mapping[str, Layer], runs: Sequence[Mapping[str, Layer]]) -> bool:
    """Return True if the runs together have the same numbers of queries and keys as the whole batch."""
    for name, layer in whole.items():
        parts = [run[name] for run in runs if name in run]
        if {(part.heads, part.query_len, part.key_len) for part in parts} != {
            (layer.heads, layer.query_len, layer.key_len)
        }:
            return False
        if len(parts) < len(runs) or sum(part.queries for part in parts) != layer.queries:
            return False
    return True


def _split(call: Call) -> list[Call]:
    """Split a call into calls of single sequences if all tensors have the same first size."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_in(call)}
    if len(sizes) != 1 or (size := sizes.pop()) < 2:
        return [call]
    return [map_tensors(partial(torch.narrow, dim=0, start=index, length=1), call) for index in range(size)]


def _weights_digests(model: nn.Module, layers: Mapping[str, Layer]) -> dict[str, str]:
    """Return a digest of the parameters of each layer's module; empty if the module contains other layers."""
    parameters = {without_wrappers(name): tensor for name, tensor in model.named_parameters(remove_duplicate=False)}
    modules = {layer.module for layer in layers.values()}
    found = dict.fromkeys(layers, "")
    for name, layer in layers.items():
        prefix = f"{layer.module}." if layer.module else ""
        own = {path: each for path, each in parameters.items() if path.startswith(prefix)}
        has_others = any(other != layer.module and other.startswith(prefix) for other in modules)
        is_on_disk = any(each.is_meta for each in own.values())
        if own and not has_others and not is_on_disk:
            found[name] = _digest(own, repr((layer.softcap, layer.causal)))
    return found


def _digest(values: Mapping[str, Tensor], start: str = "") -> str:
    found = hashlib.sha256(start.encode())
    for name in sorted(values):
        tensor = values[name].detach()
        found.update(f"{name}{tuple(tensor.shape)}".encode("utf-8", "replace"))
        found.update(tensor.double().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
