"""Models to compare, and copies of them with one head changed."""

import copy
import os

import torch
from torch import nn

from attnscale.models import default_text, encode, load_bundled


def texts(sequences, length, start=0):
    """Token ids of so many places of a text, (sequences, length)."""
    tokens = encode(default_text())
    step = len(tokens) // sequences
    return torch.stack([tokens[start + at * step :][:length] for at in range(sequences)])


def bundled():
    return load_bundled()[0]


def with_a_head(model, block, head, factor, side="query"):
    """A copy whose queries, or keys, of one head are longer."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        getattr(other.blocks[block].attention, side).weight[head * 32 : (head + 1) * 32] *= factor
    return other


def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(66, 3, 70, batch_first=True), 2, enable_nested_tensor=False
    ).eval()


def changed():
    """Return the bundled model, with one head multiplied by FACTOR of the environment; `attnscale check` loads it."""
    factor = float(os.environ.get("FACTOR", "1.5"))
    return with_a_head(bundled(), 1, 2, factor)
