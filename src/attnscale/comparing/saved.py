"""Portraits in files: `attnscale check --save` writes them, `--against` and `attnscale compare` read them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from attnscale.comparing.portrait import COMPARED, LayerPortrait, Numbers, Portrait
from attnscale.diagnose.finding import SEVERITIES, Finding
from attnscale.errors import SettingError
from attnscale.files import read_whole, write_whole
from attnscale.plain import json_text, plain

KIND, VERSION = "attnscale check", 1
DIGITS = 8  # significant digits: an unchanged model is the same to all of them
MAX_BYTES = 2**28  # 100 layers of 128 heads take a hundredth of that


def save(portrait: Portrait, path: Path) -> None:
    """Write a portrait as JSON."""
    write_whole(path, json_text(to_dict(portrait)) + "\n")


def read(path: Path) -> Portrait:
    """Read the portrait in a file."""
    try:
        return from_dict(json.loads(read_whole(path, MAX_BYTES).decode("utf-8")))
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
    """Return True for a saved check, by how the file begins; a model's config.json begins otherwise."""
    try:
        with path.open("rb") as file:
            return json.dumps(KIND).encode() in file.read(64)
    except OSError:
        return False


def to_dict(portrait: Portrait) -> dict[str, Any]:
    """Return a portrait as JSON takes it."""
    layers = {
        name: {
            "made": list(layer.digests),
            "visible": list(layer.visible),
            "samples": {statistic: _rounded(numbers) for statistic, numbers in layer.samples.items()},
        }
        for name, layer in portrait.layers.items()
    }
    found: dict[str, Any] = plain(
        {
            "kind": KIND,
            "version": VERSION,
            "title": portrait.title,
            "fed": portrait.fed,
            "inputs": portrait.inputs,
            "notes": list(portrait.notes),
            "findings": [finding.to_dict() for finding in portrait.findings],
            "layers": layers,
        }
    )
    return found


def from_dict(saved: Any) -> Portrait:
    """Return the portrait that to_dict() was given; raise a ValueError, TypeError or KeyError for anything else."""
    if not isinstance(saved, dict) or saved.get("kind") != KIND:
        raise ValueError(f"there is no kind {KIND!r}")
    if saved["version"] != VERSION:
        raise ValueError(f"expected version {VERSION}, got {saved['version']!r}")
    findings = tuple(Finding(**finding) for finding in saved.get("findings", ()))
    if not {finding.severity for finding in findings} <= set(SEVERITIES):
        raise ValueError("a finding has an unknown severity")
    layers = {
        name: _layer(name, layer["samples"], layer.get("made", ()), layer.get("visible", ()))
        for name, layer in saved["layers"].items()
    }
    notes = tuple(map(str, saved.get("notes", ())))
    return Portrait(str(saved["title"]), str(saved["fed"]), layers, findings, str(saved["inputs"]), notes)


def _layer(name: str, saved: dict[str, Any], digests: list[str], visible: list[str]) -> LayerPortrait:
    samples = {each: np.array(numbers, dtype=np.float64) for each, numbers in saved.items() if each in COMPARED}
    shapes = {numbers.shape for numbers in samples.values()}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 2 or 0 in shape:
        raise ValueError(f"the samples of the layer {name!r} are not (samples, heads) for every statistic")
    if any(np.isinf(numbers).any() for numbers in samples.values()):
        raise ValueError(f"a sample of the layer {name!r} is infinite")
    for found in (digests, visible):
        if found and len(found) != shape[1]:
            raise ValueError(f"the layer {name!r} has {len(found)} digests for {shape[1]} heads")
    return LayerPortrait(samples, tuple(map(str, digests)), tuple(map(str, visible)))


def _rounded(numbers: Numbers) -> list[list[float]]:
    return [[float(f"{each:.{DIGITS}g}") if math.isfinite(each) else math.nan for each in row] for row in numbers]
