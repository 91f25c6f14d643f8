"""A portrait in a file: what `attnscale check --save` writes and `--against` reads; every field is checked."""

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
from attnscale.train.schema import Fields, LineError

KIND, VERSION = "attnscale check", 1
DIGITS = 8  # of a number: an unchanged model is the same to all of them
MOST_BYTES = 2**28  # 100 layers of 128 heads take a hundredth of that


def save(portrait: Portrait, path: Path) -> None:
    """Write a portrait as JSON."""
    write_whole(path, json_text(to_dict(portrait)) + "\n")


def read(path: Path) -> Portrait:
    """The portrait in a file, or one sentence on what is wrong with it."""
    try:
        given = json.loads(read_whole(path, MOST_BYTES).decode("utf-8"))
        return from_dict(given)
    except OSError as error:
        raise SettingError(f"Could not read {path}: {error.strerror or error}.") from None
    except LineError as error:
        raise SettingError(f"Expected a check that was saved in {path}: {error}.") from None
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise SettingError(f"Expected a check that was saved in {path}, and it is no JSON.") from None
    except SettingError:
        raise
    except (ValueError, RecursionError):  # numbers of thousands of digits; lists in lists in lists
        raise SettingError(f"Expected a check that was saved in {path}, and it is none that can be read.") from None


def is_saved(path: Path) -> bool:
    """Whether a file is a saved check, by how it begins: a model's config.json begins otherwise."""
    try:
        with path.open("rb") as file:
            return json.dumps(KIND).encode() in file.read(64)
    except OSError:
        return False


def to_dict(portrait: Portrait) -> dict[str, Any]:
    """A portrait as JSON takes it."""
    layers = {
        name: {
            "made": list(layer.made),
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


def from_dict(given: Any) -> Portrait:
    """The portrait that to_dict() gave; a LineError says what is wrong."""
    fields = Fields(given, "the check")
    fields.one_of("kind", [KIND])
    fields.whole("version", least=1, most=VERSION)
    return Portrait(
        fields.text("title"),
        fields.text("fed"),
        {name: _layer(Fields(layer, f"the layer {name!r}")) for name, layer in fields.entries("layers").items()},
        tuple(_finding(Fields(each, "a finding")) for each in fields.items("findings")),
        fields.text("inputs"),
        tuple(_text(each) for each in fields.items("notes")),
    )


def _layer(layer: Fields) -> LayerPortrait:
    made = tuple(_text(each) for each in layer.items("made"))
    given = layer.entries("samples")
    samples = {name: _numbers(name, rows) for name, rows in given.items() if name in COMPARED}
    if not samples or len({numbers.shape for numbers in samples.values()}) > 1:
        raise LineError("expected as many numbers of every statistic of a layer as it has samples and heads")
    if made and len(made) != next(iter(samples.values())).shape[1]:
        raise LineError("expected one digest a head")
    return LayerPortrait(samples, made)


def _numbers(name: str, rows: Any) -> Numbers:
    if not isinstance(rows, list) or not rows:
        raise LineError(f"expected samples of {name!r} as a list of lists")
    found = [Fields({name: row}, "a sample").numbers(name) for row in rows]
    if len({len(row) for row in found}) > 1:
        raise LineError(f"expected as many numbers of {name!r} in every sample")
    return np.array(found, dtype=np.float64)


def _finding(given: Fields) -> Finding:
    return Finding(
        given.text("layer"),
        given.optional("head", given.whole),
        given.text("code"),
        given.one_of("severity", SEVERITIES),
        given.text("message"),
        given.optional("measured", given.number),
        given.optional("expected", given.number),
        given.text("advice"),
    )


def _text(value: Any) -> str:
    return Fields({"text": value}, "a list").text("text")


def _rounded(numbers: Numbers) -> list[list[float]]:
    return [[float(f"{each:.{DIGITS}g}") if math.isfinite(each) else math.nan for each in row] for row in numbers]
