"""Nothing that a model brings along is run, and nothing it names is fetched."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attnscale.errors import ModelError
from attnscale.loading import Request, load_model, offline
from attnscale.loading.config import safe


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return (open, (self.target, "w"))


@pytest.fixture
def no_network(monkeypatch):
    asked = []

    def refuse(self, address):
        asked.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: refuse(None, a))
    return asked


IMPLEMENTATIONS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")


@pytest.mark.parametrize("field", IMPLEMENTATIONS)
@pytest.mark.parametrize("value", ["someone/kernel", {"": "someone/kernel"}, "flash_attention_2", "no-such"])
def test_an_attention_implementation_in_the_configuration_is_overwritten(bert, configure, no_network, field, value):
    configure(**{field: value, "experts_implementation": "someone/kernel"})
    loaded = load_model(Request(str(bert)))
    assert loaded.model.config._attn_implementation == "sdpa"
    assert no_network == []


def test_code_beside_the_weights_is_never_imported(bert, configure, tmp_path, no_network):
    ran = tmp_path / "ran"
    (bert / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Model: pass\nclass Config: pass\n", encoding="utf-8")
    configure(auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForMaskedLM": "evil.Model"})
    (bert / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.Model", None]}, "tokenizer_class": "EvilTokenizer"}),
        encoding="utf-8",
    )
    loaded = load_model(Request(str(bert)))
    assert type(loaded.model).__module__.startswith("transformers.models.bert")
    configure(model_type="evil")
    with pytest.raises(ModelError, match="code that comes with a model is never run"):
        load_model(Request(str(bert)))
    assert not ran.exists()
    assert no_network == []


def test_a_class_that_is_not_the_configurations_own_is_not_made(bert, configure):
    configure(architectures=["AutoModel", "TrainingArguments", "GPT2LMHeadModel", 7])
    assert type(load_model(Request(str(bert))).model).__name__ == "BertModel"


def test_unsafe_fields_are_removed_from_nested_configurations():
    nested = {"text_config": {"_attn_implementation": "a/b", "hidden_size": 7}, "parts": [{"auto_map": {}}], "_x": 1}
    assert safe(nested, Path("config.json")) == {"text_config": {"hidden_size": 7}, "parts": [{}]}


def test_offline_reaches_libraries_imported_before_and_is_undone(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with offline():
        assert constants.is_offline_mode()
        assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert not constants.is_offline_mode()
    assert "HF_HUB_OFFLINE" not in os.environ


def test_without_transformers_one_sentence_says_what_to_install(bert):
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from attnscale.loading import Request, load_model\n"
        f"load_model(Request({str(bert)!r}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'attnscale[hf]'" in result.stderr.splitlines()[-1]


def test_a_nan_in_the_weights_is_loaded_for_the_diagnosis_to_find(bert):
    from safetensors.torch import save_file

    weights = load_file(bert / "model.safetensors")
    weights["bert.encoder.layer.0.attention.self.query.weight"][0, 0] = torch.nan
    save_file(weights, bert / "model.safetensors")
    loaded = load_model(Request(str(bert)))
    assert not loaded.model(**loaded.kwargs).logits.isfinite().all()
