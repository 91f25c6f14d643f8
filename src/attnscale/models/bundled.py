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
HELD_OUT = 0.05  # share of the text, at its end, that is excluded from training


def load_bundled() -> tuple[CausalTransformer, Tensor]:
    """Return the trained model, in float32 and evaluation mode, and an example of held-out text, (1, context).

    Help texts are repetitive: a third of the held-out text also occurs verbatim in the training text.

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
    """Return the training settings of the bundled model from its file: shape, seed, steps, corpus and final loss."""
    with _stored() as stored:
        return dict(stored.metadata())


def split(text: str) -> tuple[Tensor, Tensor]:
    """Split a text into tokens to train on and held-out tokens."""
    tokens = encode(text)
    cut = round(len(tokens) * (1 - HELD_OUT))
    return tokens[:cut], tokens[cut:]


@contextmanager
def _stored() -> Iterator[Any]:
    with needing("The bundled model"):
        from safetensors import safe_open
    with as_file(WEIGHTS) as path, safe_open(path, framework="pt") as stored:
        yield stored
