"""Published settings: their multipliers relative to 1/√d_k, and the models' own code in transformers."""

import math

import pytest

from attnscale.claims.settings import SETTINGS, find, llama4_temperature

TINY = {"num_hidden_layers": 1, "vocab_size": 11, "intermediate_size": 16}


@pytest.mark.parametrize(
    ("model", "relative"),
    [("GPT-2", 1.0), ("LLaMA-2 7B", 1.0), ("T5-base", 8.0), ("Gemma-2 27B", math.sqrt(128 / 144)),
     ("Granite 3.1 2B", 1 / 8)],
)  # fmt: skip
def test_a_multiplier_is_given_relative_to_one_over_root_dim(model, relative):
    assert find(model).relative == pytest.approx(relative)
    assert find(model).standard == (relative == 1.0)
    assert all(setting.stated for setting in SETTINGS)
    assert not find("Swin-v2").standard  # a learned one


def test_llama_4_leaves_its_first_8191_tokens_at_the_standard_scale():
    assert llama4_temperature(8190) == 1.0
    assert llama4_temperature(8191) == pytest.approx(1 + 0.1 * math.log(2))


MODELS = {  # kind, sizes, path of an attention
    "GPT-2": ("GPT2", {"n_embd": 128, "n_head": 2, "n_layer": 1, "vocab_size": 11}, "h.0.attn"),
    "LLaMA-2 7B": ("Llama", {"hidden_size": 256, "num_attention_heads": 2, **TINY}, "layers.0.self_attn"),
    "Gemma-2 27B": (
        "Gemma2",
        {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128,
         "query_pre_attn_scalar": 144, **TINY},
        "layers.0.self_attn",
    ),
    "Granite 3.1 2B": (
        "Granite",
        {"hidden_size": 128, "num_attention_heads": 2, "attention_multiplier": 0.015625, **TINY},
        "layers.0.self_attn",
    ),
    "T5-base": (
        "T5",
        {"d_model": 32, "d_kv": 64, "num_heads": 2, "num_layers": 1, "d_ff": 16, "vocab_size": 11},
        "encoder.block.0.layer.0.SelfAttention",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", MODELS)
def test_the_ledger_multiplies_by_what_the_model_multiplies_by(name):
    transformers = pytest.importorskip("transformers")
    kind, sizes, attention = MODELS[name]
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes))
    assert model.get_submodule(attention).scaling == pytest.approx(find(name).multiplier)


@pytest.mark.filterwarnings("default")
def test_the_ledgers_learned_scales_are_parameters_of_those_models():
    t = pytest.importorskip("transformers")
    swin = t.Swinv2Model(t.Swinv2Config(image_size=32, depths=[1], num_heads=[3], embed_dim=48, window_size=4))
    assert any(name.endswith("logit_scale") for name, _ in swin.named_parameters())
    qwen = t.Qwen3Model(t.Qwen3Config(hidden_size=32, num_attention_heads=2, head_dim=16, **TINY))
    assert {name.split(".")[-2] for name, _ in qwen.named_parameters() if "self_attn" in name} >= {"q_norm", "k_norm"}
