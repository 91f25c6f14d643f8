"""The model that ships with the package: four layers, trained on Python's help texts.

Made by `python scripts/train_bundled_model.py`.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from typing import Any

from torch import Tensor

from attnscale.extras import needing
from attnscale.models.text import default_text, encode
from attnscale.models.transformer import CausalTransformer

WEIGHTS = files("attnscale.models") / "bundled.safetensors"
HELD_OUT = 0.05  # share of the text, its end, that training does not see


def load_bundled() -> tuple[CausalTransformer, Tensor]:
    """The trained model, in float32 and eval mode, and an example input, (1, context): from the text held out.

    Help texts repeat themselves: a third of what was held out stands word for word in what was trained on.

    >>> model, tokens = load_bundled()
    >>> model(tokens).shape
    torch.Size([1, 256, 256])
    """
    with _stored() as stored:
        shape = json.loads(stored.metadata()["shape"])
        weights = {name: stored.get_tensor(name).float() for name in stored.keys()}  # noqa: SIM118 (not a dict)
    model = CausalTransformer(**shape)
    model.load_state_dict(weights)
    return model.eval(), split(default_text())[1][None, : model.context]


def about_bundled() -> dict[str, str]:
    """How it was trained: shape, seed, steps, corpus and the loss it reached, as recorded in the file."""
    with _stored() as stored:
        return dict(stored.metadata())


def split(text: str) -> tuple[Tensor, Tensor]:
    """The tokens to train on, and those held out."""
    tokens = encode(text)
    cut = round(len(tokens) * (1 - HELD_OUT))
    return tokens[:cut], tokens[cut:]


@contextmanager
def _stored() -> Iterator[Any]:
    with needing("The bundled model"):
        from safetensors import safe_open
    with as_file(WEIGHTS) as path, safe_open(path, framework="pt") as stored:
        yield stored
