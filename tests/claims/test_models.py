"""The published settings in the ledger against the models' own code in transformers."""

import pytest

from attnscale.claims.settings import find

transformers = pytest.importorskip("transformers")
TINY = {"num_hidden_layers": 1, "vocab_size": 11, "intermediate_size": 16}


def models():
    t = transformers
    llama = t.LlamaConfig(hidden_size=256, num_attention_heads=2, **TINY)
    gemma = t.Gemma2Config(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=128, query_pre_attn_scalar=144, **TINY
    )
    granite = t.GraniteConfig(hidden_size=128, num_attention_heads=2, attention_multiplier=0.015625, **TINY)
    t5 = t.T5Config(d_model=32, d_kv=64, num_heads=2, num_layers=1, d_ff=16, vocab_size=11)
    return {
        "GPT-2": (t.GPT2Model, t.GPT2Config(n_embd=128, n_head=2, n_layer=1, vocab_size=11), "h.0.attn"),
        "LLaMA-2 7B": (t.LlamaModel, llama, "layers.0.self_attn"),
        "Gemma-2 27B": (t.Gemma2Model, gemma, "layers.0.self_attn"),
        "Granite 3.1 2B": (t.GraniteModel, granite, "layers.0.self_attn"),
        "T5-base": (t.T5EncoderModel, t5, "encoder.block.0.layer.0.SelfAttention"),
    }


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["GPT-2", "LLaMA-2 7B", "Gemma-2 27B", "Granite 3.1 2B", "T5-base"])
def test_the_ledger_multiplies_by_what_the_model_multiplies_by(name):
    model, config, attention = models()[name]
    setting = find(name)
    assert model(config).get_submodule(attention).scaling == pytest.approx(setting.multiplier)


@pytest.mark.filterwarnings("default")
def test_the_ledgers_learned_scales_are_parameters_of_those_models():
    t = transformers
    swin = t.Swinv2Model(t.Swinv2Config(image_size=32, depths=[1], num_heads=[3], embed_dim=48, window_size=4))
    names = {name for name, _ in swin.named_parameters()}
    assert any(name.endswith("logit_scale") for name in names)
    qwen = t.Qwen3Model(t.Qwen3Config(hidden_size=32, num_attention_heads=2, head_dim=16, **TINY))
    assert {name.split(".")[-2] for name, _ in qwen.named_parameters() if "self_attn" in name} >= {"q_norm", "k_norm"}
