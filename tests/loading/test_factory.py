import pytest
import torch
from torch import nn

from attnscale.errors import ModelError, SettingError
from attnscale.loading import Request, load_model

MODULE = """
import torch
from torch import nn
from attnscale.models import CausalTransformer

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True)
    def forward(self, x, flip=None):
        return self.inner(x, x, x)

ready = Tiny()
x = torch.zeros(1, 5, 6)
def with_tensor(): return Tiny(), x
def with_tuple(): return Tiny(), (x,)
def with_dict(): return Tiny(), {"x": x, "flip": [x]}
def own(): return CausalTransformer(256, d_model=12, layers=1, heads=2)
def number(): return 7
def odd(): return Tiny(), 7
def fails(): raise ValueError("no\\nsuch width")
def leaves(): raise SystemExit("bye")
def too_large(): raise MemoryError
def too_large_for_torch(): return torch.empty(2**60)
class Box:
    inner = staticmethod(with_tensor)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    (tmp_path / "mine_to_check.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "mine_to_check", raising=False)


def load(name, **options):
    return load_model(Request(f"mine_to_check:{name}", **options))


@pytest.mark.parametrize("name", ["with_tensor", "with_tuple", "with_dict", "Box.inner"])
def test_a_model_comes_with_its_inputs_however_they_are_packed(name):
    loaded = load(name)
    output, _ = loaded.model(*loaded.args, **loaded.kwargs)
    assert output.shape == (1, 5, 6)
    assert isinstance(loaded.model, nn.Module)
    assert not loaded.model.training


def test_a_transformer_of_the_librarys_own_gets_text():
    loaded = load("own", text="why root d", length=7)
    assert torch.equal(loaded.args[0], torch.tensor([list(b"why roo")]))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing", "Could not make the model mine_to_check:nothing: AttributeError"),
        ("fails", r"ValueError, no such width \(mine_to_check.py, line \d+\)"),
        ("leaves", "SystemExit, bye"),
        ("too_large", "^Out of memory: could not make the model"),
        ("too_large_for_torch", "^Out of memory: could not make the model"),
        ("number", "to be or to return an nn.Module, alone or as .* got int"),
        ("odd", "inputs of mine_to_check:odd as a tensor, a tuple or a dict"),
        ("ready", "returns a Tiny without inputs"),
        ("Tiny", "returns a Tiny without inputs"),
    ],
)
def test_a_factory_that_fails_is_reported_in_one_sentence(name, sentence):
    with pytest.raises(ModelError, match=sentence) as caught:
        load(name)
    assert "\n" not in str(caught.value)


def test_a_missing_module_is_named():
    with pytest.raises(ModelError, match="ModuleNotFoundError, No module named 'no_such_module'"):
        load_model(Request("no_such_module:make"))


def test_a_factory_decides_on_its_own_weights_and_inputs():
    with pytest.raises(SettingError, match="--random-init is for"):
        load("own", random_init=True)
    with pytest.raises(SettingError, match="brings its own inputs"):
        load("with_tensor", length=5)
