"""Private names of torch: all in one file, and none of them worth a user's forward."""

import ast
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

import attnscale
from attnscale import torch_internals
from attnscale.errors import AttnscaleError
from attnscale.torch_internals import INTERNALS

SRC = Path(attnscale.__file__).parent
NAMES = {internal.name: internal for internal in INTERNALS}
# Of torch's objects, not of its modules: what a search by "torch." does not find.
OF_OBJECTS = {
    "_ragged_idx",
    "_maybe_max_seqlen",
    "_local_tensor",
    "_version",
    "_schema",
    "_qkv_same_embed_dim",
    "_call_impl",
}


@pytest.mark.parametrize("name", NAMES)
def test_this_torch_has_every_internal(name):
    internal = NAMES[name]
    assert internal.found is not None, f"torch {torch.__version__} has no {name}: {internal.lost}."


def private_names(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "torch")
        elif isinstance(node, ast.Attribute):
            yield dotted(node) if dotted(node).startswith("torch.") else ""
            yield node.attr if node.attr in OF_OBJECTS or node.attr.startswith("_saved_") else ""


def dotted(node):
    """a.b.c of names alone, from its syntax; what begins otherwise begins with a question mark."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def is_private(name):
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_private_names_stand_in_one_file():
    paths = [path for path in SRC.rglob("*.py") if path.name != "torch_internals.py"]
    found = {(str(path.relative_to(SRC)), name) for path in paths for name in private_names(path) if is_private(name)}
    assert sorted(found) == []


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.TransformerEncoderLayer(24, 2, 24, dropout=0.0, batch_first=True)
        self.second = attnscale.MultiheadAttention(24, 2, batch_first=True, scale="inverse_dim", softcap=30.0)

    def forward(self, x):
        x = self.first(x)
        return x + self.second(x, x, x, need_weights=False)[0]


@pytest.mark.filterwarnings("default")  # what was lost is told
@pytest.mark.parametrize("name", NAMES)
def test_a_missing_internal_changes_no_output_or_gradient(name, monkeypatch):
    torch.manual_seed(3)
    model, x = Model(), torch.randn(2, 7, 24)
    plain = model(x)
    plain.square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    monkeypatch.setattr(NAMES[name], "found", None)
    torch_internals_cache_clear()
    outputs = []
    with suppress(AttnscaleError), attnscale.watch(model):  # nothing was seen, or nothing can be
        outputs.append(model(x))
    assert all(torch.equal(output, plain) for output in outputs)
    model.zero_grad()
    monitor = attnscale.Monitor(model, every=1)
    for _ in range(2):
        model.zero_grad()
        model(x).square().sum().backward()
        monitor.step()
    monitor.close()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))
    torch_internals_cache_clear()


def torch_internals_cache_clear():
    from attnscale.watching.kernels import traits_of

    traits_of.cache_clear()


def test_every_internal_says_what_is_lost_without_it():
    lost = Counter(internal.lost for internal in INTERNALS)
    assert max(lost.values()) <= 2  # a forward and its backward, or two names of one feature
    assert len(lost) >= len(INTERNALS) - 2
    assert all(internal.name.startswith("torch.") and internal.lost for internal in INTERNALS)
    assert torch_internals.can_watch()
