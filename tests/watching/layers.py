"""Attentions that tests watch, and the layers that a watched model should show, and no other."""

import torch
import torch.nn.functional as F

from tests.zoo.entry import SelfAttention


class Plain(SelfAttention):
    """Attention written out."""

    def forward(self, x):
        query, key, value = self.project(x)
        return self.merge(torch.softmax(query @ key.mT / self.head_dim**0.5, -1) @ value)


class Fused(SelfAttention):
    """Attention by torch's kernel."""

    def forward(self, x):
        return self.merge(F.scaled_dot_product_attention(*self.project(x)))


def found_layers(seen, expected):
    """The expected layers, each under its own path or that of a module inside it, and no other."""
    found = {}
    for path in expected.layers:
        names = [name for name in seen.layers if name == path or name.startswith(f"{path}.")]
        assert len(names) == 1, f"expected one layer at {path}, got {names} of {list(seen.layers)}"
        found[path] = seen.layers[names[0]]
    assert len(seen.layers) == len(found), f"expected {list(found)}, got {list(seen.layers)}"
    return found
