"""Hugging Face architectures at random initialisation, small, and what the attention of each is configured to do."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers

TOKENS = {"vocab_size": 101}
# A standard deviation that gives queries and keys of an ordinary size at these widths, as 0.02 does at 768.
ORDINARY = {"initializer_range": 0.12}
DECODER = {
    "hidden_size": 60, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 5,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    **TOKENS, **ORDINARY,
}  # fmt: skip
ENCODER = {
    "hidden_size": 33, "intermediate_size": 47, "num_hidden_layers": 2, "num_attention_heads": 3, "pad_token_id": 0,
    "max_position_embeddings": 64, **TOKENS, **ORDINARY,
}  # fmt: skip
ATTENTIONS = "attentions"


@dataclass(frozen=True)
class Architecture:
    """A model, its configuration, and for each of its attentions the scale and where its eager weights come out."""

    model: str
    config: str
    settings: dict
    layers: dict[str, float]  # path: configured scale
    heads: int
    head_dim: int
    kv_heads: int | None = None
    causal: bool = False
    softcap: float | None = None
    inputs: Callable[[], dict] = lambda: {"input_ids": torch.randint(3, 101, (2, 13))}
    implementations: tuple[str, ...] = ("eager", "sdpa")
    declares: bool = True  # whether the configuration says the scale
    weights: dict[str, str] = field(default_factory=lambda: {"": ATTENTIONS})  # prefix of paths: field of the output

    def build(self, implementation: str = "eager", **more):
        """The model with the same weights whatever the implementation, and its inputs."""
        torch.manual_seed(7)
        config = getattr(transformers, self.config)(**self.settings | more)
        model = getattr(transformers, self.model)._from_config(config, attn_implementation=implementation).eval()
        torch.manual_seed(11)
        return model, self.inputs()

    def eager_weights(self, outputs) -> dict[str, torch.Tensor]:
        """The attention weights of an eager forward, by path."""
        found = {}
        for prefix, name in self.weights.items():
            paths = [path for path in self.layers if prefix in path]
            found |= dict(zip(paths, outputs[name], strict=False))
        return found


def padded():
    mask = torch.ones(2, 13, dtype=torch.int64)
    mask[1, 9:] = 0
    return {"input_ids": torch.randint(3, 101, (2, 13)), "attention_mask": mask}


def encoder_decoder():
    return {"input_ids": torch.randint(3, 101, (2, 13)), "decoder_input_ids": torch.randint(3, 101, (2, 7))}


def pixels(size=12):
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


def layers(pattern: str, scale: float, count: int = 2) -> dict[str, float]:
    return {pattern.format(index): scale for index in range(count)}


def bert_like(model, config, **settings):
    paths = layers("encoder.layer.{}.attention", 11**-0.5)
    return Architecture(model, config, ENCODER | settings, paths, 3, 11, inputs=padded)


def llama_like(model, config, scale=12**-0.5, kv_heads=5, head_dim=12, softcap=None, implementations=("eager", "sdpa"),
               **settings):  # fmt: skip
    return Architecture(
        model, config, DECODER | {"num_key_value_heads": kv_heads, "head_dim": head_dim} | settings,
        layers("layers.{}.self_attn", scale), 5, head_dim, kv_heads, causal=True, softcap=softcap,
        implementations=implementations,
    )  # fmt: skip


GPT2 = {
    "n_embd": 57,
    "n_head": 3,
    "n_layer": 2,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **TOKENS,
    **ORDINARY,
}
BART_PATHS = (
    layers("encoder.layers.{}.self_attn", 11**-0.5)
    | layers("decoder.layers.{}.self_attn", 11**-0.5)
    | layers("decoder.layers.{}.encoder_attn", 11**-0.5)
)
BART_WEIGHTS = {
    "encoder.layers": "encoder_attentions",
    "decoder.layers": "decoder_attentions",
    "encoder_attn": "cross_attentions",
}

ARCHITECTURES = {
    "BERT": bert_like("BertModel", "BertConfig"),
    "RoBERTa": bert_like("RobertaModel", "RobertaConfig"),
    "ELECTRA": bert_like("ElectraModel", "ElectraConfig", embedding_size=33),
    "ALBERT": Architecture(
        "AlbertModel", "AlbertConfig", ENCODER | {"embedding_size": 29},
        layers("encoder.albert_layer_groups.0.albert_layers.0.attention[{}]", 11**-0.5), 3, 11,
    ),
    "DistilBERT": Architecture(
        "DistilBertModel", "DistilBertConfig",
        {"dim": 33, "n_heads": 3, "n_layers": 2, "hidden_dim": 47, "max_position_embeddings": 64, **TOKENS, **ORDINARY},
        layers("transformer.layer.{}.attention", 11**-0.5), 3, 11, inputs=padded,
    ),
    "DeBERTa-v2": Architecture(
        "DebertaV2Model", "DebertaV2Config",
        ENCODER | {"hidden_size": 44, "num_attention_heads": 4, "relative_attention": True,
         "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
        layers("encoder.layer.{}.attention", (3 * 11) ** -0.5), 4, 11, implementations=("eager",),
    ),
    "GPT-2": Architecture(
        "GPT2Model", "GPT2Config", GPT2, layers("h.{}.attn", 19**-0.5), 3, 19, causal=True,
    ),
    "GPT-2 by layer": Architecture(
        "GPT2Model", "GPT2Config", GPT2 | {"scale_attn_by_inverse_layer_idx": True},
        {"h.0.attn": 19**-0.5, "h.1.attn": 19**-0.5 / 2}, 3, 19, causal=True,
    ),
    "GPT-2 unscaled": Architecture(
        "GPT2Model", "GPT2Config", GPT2 | {"scale_attn_weights": False, "initializer_range": 0.07},
        layers("h.{}.attn", 1.0), 3, 19, causal=True,
    ),
    "GPT-Neo": Architecture(
        "GPTNeoModel", "GPTNeoConfig",
        {"hidden_size": 57, "num_heads": 3, "num_layers": 2, "bos_token_id": 1, "eos_token_id": 2,
         "attention_types": [[["global", "local"], 1]],
         "window_size": 5, "max_position_embeddings": 64, "initializer_range": 0.07, **TOKENS},
        layers("h.{}.attn.attention", 1.0), 3, 19, causal=True, implementations=("eager",),
    ),
    "GPT-NeoX": Architecture(
        "GPTNeoXModel", "GPTNeoXConfig", DECODER, layers("layers.{}.attention", 12**-0.5), 5, 12, causal=True,
    ),
    "OPT": Architecture(
        "OPTModel", "OPTConfig",
        {"hidden_size": 33, "num_attention_heads": 3, "num_hidden_layers": 2, "ffn_dim": 47, "word_embed_proj_dim": 33,
         "max_position_embeddings": 64, "init_std": 0.12, **TOKENS},
        layers("decoder.layers.{}.self_attn", 11**-0.5), 3, 11, causal=True,
    ),
    "BLOOM": Architecture(
        "BloomModel", "BloomConfig", {"hidden_size": 33, "n_head": 3, "n_layer": 2, **TOKENS, **ORDINARY},
        layers("h.{}.self_attention", 11**-0.5), 3, 11, causal=True, implementations=("eager",),
    ),
    "MPT": Architecture(
        "MptModel", "MptConfig",
        {"d_model": 44, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, **TOKENS, **ORDINARY},
        layers("blocks.{}.attn", 11**-0.5), 4, 11, causal=True, implementations=("eager",),
    ),
    "Falcon": Architecture(
        "FalconModel", "FalconConfig", {k: v for k, v in DECODER.items() if k != "intermediate_size"},
        layers("h.{}.self_attention", 12**-0.5), 5, 12, 1, causal=True,
    ),
    "Llama": llama_like("LlamaModel", "LlamaConfig", kv_heads=1, implementations=("eager", "sdpa", "flex_attention")),
    "Mistral": llama_like("MistralModel", "MistralConfig", sliding_window=4),
    "Qwen2": llama_like("Qwen2Model", "Qwen2Config", kv_heads=1),
    "Qwen3": llama_like("Qwen3Model", "Qwen3Config", 14**-0.5, kv_heads=1, head_dim=14),
    "Gemma 2": llama_like(
        "Gemma2Model", "Gemma2Config", 23**-0.5, kv_heads=1, head_dim=16, query_pre_attn_scalar=23,
        softcap=50.0, implementations=("eager", "flex_attention"), sliding_window=5,
    ),
    "Gemma 3": llama_like(
        "Gemma3TextModel", "Gemma3TextConfig", 23**-0.5, kv_heads=1, head_dim=16, query_pre_attn_scalar=23,
    ),
    "Granite": llama_like("GraniteModel", "GraniteConfig", 0.21, attention_multiplier=0.21),
    "Cohere": llama_like("CohereModel", "CohereConfig", use_qk_norm=True),
    "OLMo 2": llama_like("Olmo2Model", "Olmo2Config"),
    "Phi-3": llama_like("Phi3Model", "Phi3Config", kv_heads=1),
    "gpt-oss": llama_like(
        "GptOssModel", "GptOssConfig", 14**-0.5, kv_heads=1, head_dim=14, implementations=("eager",),
        num_local_experts=2, num_experts_per_tok=1, sliding_window=5,
    ),
    "DeepSeek-V3": Architecture(
        "DeepseekV3Model", "DeepseekV3Config",
        DECODER | {"num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 17, "kv_lora_rank": 23,
         "qk_nope_head_dim": 13, "qk_rope_head_dim": 6, "v_head_dim": 11, "moe_intermediate_size": 8,
         "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        layers("layers.{}.self_attn", 19**-0.5), 3, 19, causal=True,
    ),
    "T5": Architecture(
        "T5Model", "T5Config",
        {"d_model": 39, "d_kv": 11, "num_heads": 3, "num_layers": 2, "d_ff": 47, **TOKENS},
        layers("encoder.block.{}.layer.0.SelfAttention", 1.0)
        | layers("decoder.block.{}.layer.0.SelfAttention", 1.0)
        | layers("decoder.block.{}.layer.1.EncDecAttention", 1.0),
        3, 11, inputs=encoder_decoder, implementations=("eager",),
        weights={"encoder.block": "encoder_attentions", "decoder.block": "decoder_attentions",
                 "EncDec": "cross_attentions"},
    ),
    "BART": Architecture(
        "BartModel", "BartConfig",
        {"d_model": 33, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
         "decoder_attention_heads": 3, "encoder_ffn_dim": 47, "decoder_ffn_dim": 47, "max_position_embeddings": 64,
         "init_std": 0.12, **TOKENS},
        BART_PATHS, 3, 11, inputs=encoder_decoder, weights=BART_WEIGHTS,
    ),
    "Whisper": Architecture(
        "WhisperModel", "WhisperConfig",
        {"d_model": 33 + 33, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 6,
         "decoder_attention_heads": 6, "encoder_ffn_dim": 47, "decoder_ffn_dim": 47, "num_mel_bins": 7,
         "max_source_positions": 13, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2, "decoder_start_token_id": 1, "init_std": 0.12, **TOKENS},
        BART_PATHS, 6, 11, weights=BART_WEIGHTS,
        inputs=lambda: {"input_features": torch.randn(2, 7, 26), "decoder_input_ids": torch.randint(3, 101, (2, 7))},
    ),
    "ViT": Architecture(
        "ViTModel", "ViTConfig",
        {"hidden_size": 33, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 47,
         "image_size": 12, "patch_size": 3, **ORDINARY},
        layers("layers.{}.attention", 11**-0.5), 3, 11, inputs=pixels(),
    ),
    "Swin": Architecture(
        "SwinModel", "SwinConfig",
        {"embed_dim": 22, "depths": [2], "num_heads": [2], "window_size": 4, "image_size": 32, "patch_size": 4,
         **ORDINARY},
        layers("encoder.layers.0.blocks.{}.attention", 11**-0.5), 2, 11, inputs=pixels(32),
        implementations=("eager",), weights={"blocks.1": ATTENTIONS},
    ),
    "Swin v2": Architecture(
        "Swinv2Model", "Swinv2Config",
        {"embed_dim": 22, "depths": [2], "num_heads": [2], "window_size": 4, "image_size": 32, "patch_size": 4,
         **ORDINARY},
        layers("encoder.layers.0.blocks.{}.attention", 10.0), 2, 11, inputs=pixels(32), declares=False,
        implementations=("eager",), weights={"blocks.1": ATTENTIONS},
    ),
    "CLIP": Architecture(
        "CLIPModel", "CLIPConfig",
        {"text_config": {"hidden_size": 33, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 47,
                         "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2, **TOKENS},
         "vision_config": {"hidden_size": 33, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 47,
                           "image_size": 12, "patch_size": 3}, "projection_dim": 17},
        {"text_model.encoder.layers.0.self_attn": 11**-0.5, "vision_model.encoder.layers.0.self_attn": 11**-0.5},
        3, 11,
        inputs=lambda: {"input_ids": torch.randint(3, 101, (2, 13)), "pixel_values": torch.randn(2, 3, 12, 12)},
        weights={},
    ),
}  # fmt: skip
