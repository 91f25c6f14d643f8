"""Old configurations, GGUF files and adapters."""

import json
import warnings
from importlib.util import find_spec

import numpy as np
import pytest
import torch

import attnscale
from attnscale.checking import check_model
from attnscale.errors import ModelError
from attnscale.loading import Request, load_model, offline
from tests.loading.conftest import hide

GGUF = pytest.mark.skipif(find_spec("gguf") is None, reason="the package gguf is not here")
PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="the package peft is not here")


def without_type(folder, **fields):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config | fields), encoding="utf-8")


def test_a_configuration_without_a_type_needs_one(bert):
    without_type(bert)
    with pytest.raises(ModelError, match='such as "model_type": "bert", or give --model-type'):
        load_model(Request(str(bert)))
    assert "BertForMaskedLM" in load_model(Request(str(bert), model_type="bert")).title


def test_a_type_that_contradicts_the_configuration_is_refused(bert):
    with pytest.raises(ModelError, match="leave --model-type out"):
        load_model(Request(str(bert), model_type="gpt2"))


def write_gguf(path, factor=1.0):
    """Write a Llama of two layers, as llama.cpp lays it out; the queries are multiplied by the factor."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    width, inner, vocabulary = 64, 96, 128
    sizes = {
        "name": "small", "block_count": 2, "context_length": 256, "embedding_length": width, "head_count": 4,
        "feed_forward_length": inner, "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0,
        "vocab_size": vocabulary,
    }  # fmt: skip
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)
    block = {
        "attn_q": (width, width), "attn_k": (width // 2, width), "attn_v": (width // 2, width),
        "attn_output": (width, width), "ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner),
    }  # fmt: skip
    matrices = {"token_embd": (vocabulary, width), "output": (vocabulary, width)}
    matrices |= {f"blk.{at}.{name}": shape for at in range(2) for name, shape in block.items()}
    random = np.random.default_rng(0)
    for name, shape in matrices.items():
        values = random.standard_normal(shape).astype(np.float32) * shape[-1] ** -0.5
        values *= factor if name.endswith("attn_q") else 1.0
        quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("output_norm", *(f"blk.{at}.{part}_norm" for at in range(2) for part in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.ones(width, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@GGUF
def test_a_gguf_file_is_read_through_transformers(tmp_path, capfd):
    path = write_gguf(tmp_path / "small.gguf")
    capfd.readouterr()
    checked = check_model(Request(str(path)))
    assert capfd.readouterr() == ("", "")
    layers = checked.audit.layers
    assert checked.title == f"LlamaForCausalLM from {tmp_path / 'small.gguf'}"
    assert [(layer.heads, layer.kv_heads, layer.head_dim, layer.causal) for layer in layers.values()] == [
        (4, 2, 16, True)
    ] * 2
    assert all(layer.scale_applied == pytest.approx(0.25) for layer in layers.values())


@GGUF
def test_the_weights_of_a_gguf_file_reach_the_scores(tmp_path):
    one, other = (write_gguf(tmp_path / f"{factor}.gguf", factor) for factor in (1.0, 2.0))
    found = attnscale.compare(one, other)
    assert len(found.changed) == 8
    assert found.heads[0].moves["query_norm"].change == pytest.approx(np.log(2), abs=0.02)


@GGUF
@pytest.mark.parametrize("size", [0, 30, 2000])
def test_a_damaged_gguf_file_is_one_sentence(tmp_path, size):
    path = write_gguf(tmp_path / "small.gguf")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"Could not|Out of memory"):
        load_model(Request(str(path)))


@pytest.fixture
def adapter(saved_bert, tmp_path):
    """LoRA on the queries of a BERT, as peft saves it."""
    peft = pytest.importorskip("peft")
    base = load_model(Request(str(saved_bert))).model
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
    folder = tmp_path / "adapter"
    with offline(), warnings.catch_warnings(action="ignore"):  # on a base that has no name
        peft.get_peft_model(base, config).save_pretrained(folder)
    return folder


@PEFT
def test_an_adapter_is_put_on_its_base(saved_bert, adapter):
    plain, adapted = (load_model(Request(str(path), base=str(saved_bert))) for path in (saved_bert, adapter))
    before, after = (dict(loaded.model.named_parameters()) for loaded in (plain, adapted))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("query.weight")}
    assert adapted.title.endswith(f"with the adapter {adapter}")


@PEFT
def test_an_adapter_may_name_its_base_but_no_path(adapter):
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    for name, said in (
        ("/etc", "not a model's name"),
        (None, "not a model's name"),
        ("some/model", "no model 'some/model'"),
    ):
        (adapter / "adapter_config.json").write_text(
            json.dumps(config | {"base_model_name_or_path": name}), encoding="utf-8"
        )
        with pytest.raises(ModelError, match=said):
            load_model(Request(str(adapter)))


@PEFT
def test_an_adapter_of_another_model_is_refused(adapter, saved_bert, tmp_path):
    config = json.loads((saved_bert / "config.json").read_text(encoding="utf-8"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}), encoding="utf-8")
    with pytest.raises(ModelError, match=r"does not fit its base|Could not put"):
        load_model(Request(str(adapter), base=str(other)))


@pytest.mark.parametrize(("package", "file"), [("gguf", "small.gguf"), ("peft", "adapter_config.json")])
def test_a_missing_package_is_named_with_what_installs_it(tmp_path, saved_bert, monkeypatch, package, file):
    hide(monkeypatch, package)
    (tmp_path / file).write_text('{"peft_type": "LORA"}', encoding="utf-8")
    path = tmp_path / file if package == "gguf" else tmp_path
    with pytest.raises(ModelError, match=f"needs the package {package}: pip install {package}"):
        load_model(Request(str(path), base=str(saved_bert)))
