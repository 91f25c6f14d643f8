"""Configurations without a type, weights alone, GGUF files; adapters are refused."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import attnscale
from attnscale.checking import check_model
from attnscale.errors import ModelError
from attnscale.loading import Request, load_model

GGUF = pytest.mark.skipif(find_spec("gguf") is None, reason="the package gguf is not here")


def test_a_configuration_without_a_type_needs_one(configure, bert):
    configure(model_type=None)
    with pytest.raises(ModelError, match='Add it: "model_type": "bert"'):
        load_model(Request(str(bert)))


def test_an_adapter_is_to_be_merged_first(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")
    with pytest.raises(ModelError, match="merge the adapter into its base first"):
        load_model(Request(str(tmp_path)))


def test_weights_alone_say_what_to_give_with_them(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({name: value.contiguous() for name, value in nn.Linear(2, 3).state_dict().items()}, path)
    with pytest.raises(ModelError, match=r"holds weights alone.*package\.module:callable, which makes"):
        load_model(Request(str(path)))


def test_a_pickle_with_more_than_tensors_is_refused_there_too(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save({"model": nn.Linear(2, 2)}, path)
    with pytest.raises(ModelError, match="could run code"):
        load_model(Request(str(path)))


def write_gguf(path, factor=1.0):
    """A Llama of two layers, as llama.cpp lays it out."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    width, heads, inner, vocabulary = 64, 4, 96, 128
    writer.add_name("small")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocabulary)
    random = np.random.default_rng(0)

    def matrix(name, *shape, times=1.0):
        values = random.standard_normal(shape).astype(np.float32) * shape[-1] ** -0.5 * times
        quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    matrix("token_embd.weight", vocabulary, width)
    for block in range(2):
        writer.add_tensor(f"blk.{block}.attn_norm.weight", np.ones(width, dtype=np.float32))
        writer.add_tensor(f"blk.{block}.ffn_norm.weight", np.ones(width, dtype=np.float32))
        matrix(f"blk.{block}.attn_q.weight", width, width, times=factor)
        matrix(f"blk.{block}.attn_k.weight", width // 2, width)
        matrix(f"blk.{block}.attn_v.weight", width // 2, width)
        matrix(f"blk.{block}.attn_output.weight", width, width)
        matrix(f"blk.{block}.ffn_gate.weight", inner, width)
        matrix(f"blk.{block}.ffn_up.weight", inner, width)
        matrix(f"blk.{block}.ffn_down.weight", width, inner)
    writer.add_tensor("output_norm.weight", np.ones(width, dtype=np.float32))
    matrix("output.weight", vocabulary, width)
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


def test_without_the_package_a_gguf_file_says_which_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("attnscale.loading.huggingface.find_spec", lambda name: None)
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="needs the package gguf: pip install gguf"):
        load_model(Request(str(path)))
