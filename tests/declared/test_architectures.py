"""Every published exception, built small and at random: the scale its code applies is the one said of it."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

import attnscale
from attnscale.declared import Authority, declared
from attnscale.declared.configuration import BY_DIM, BY_WIDTH, DISENTANGLED, UNSCALED
from tests.others import OTHERS_MAY_WARN
from tests.watching.architectures import ENCODER, TOKENS, encoder_decoder, layers
from tests.watching.layers import found_layers

pytestmark = OTHERS_MAY_WARN  # transformers' and torch's own


@dataclass(frozen=True)
class Published:
    """A model, the entries it stands for, and the scale of each of its attentions."""

    kinds: tuple[str, ...]  # model_type, of the whole or of its parts
    model: str
    settings: dict
    layers: dict[str, float]  # path: scale
    inputs: Callable[[], dict]

    def watched(self):
        """The layers of one forward, by path; those expected and no other."""
        kind = getattr(transformers, self.model)
        model = kind(kind.config_class(**self.settings)).eval()
        with torch.no_grad(), attnscale.watch(model) as seen:
            model(**self.inputs())
        return found_layers(seen, self)


def tokens(length=13):
    return torch.randint(3, 101, (2, length))


def t5_like(kind, model, inputs=encoder_decoder, local="SelfAttention", **settings):
    return Published(
        (kind,), model,
        {"d_model": 39, "d_kv": 11, "num_heads": 3, "num_layers": 2, "num_decoder_layers": 2, "d_ff": 47, **TOKENS,
         **settings},
        layers(f"encoder.block.{{}}.layer.0.{local}", 1.0)
        | layers("decoder.block.{}.layer.0.SelfAttention", 1.0)
        | layers("decoder.block.{}.layer.1.EncDecAttention", 1.0),
        inputs,
    )  # fmt: skip


def a_page():
    return encoder_decoder() | {"bbox": torch.rand(2, 13, 4), "pixel_values": torch.randn(2, 3, 12, 12)}


def patches():
    places = torch.randint(0, 4, (2, 13, 2)).float()  # row and column of each patch, before its pixels
    return {"flattened_patches": torch.cat([places, torch.randn(2, 13, 12)], -1), "decoder_input_ids": tokens(7)}


SEW_D = {
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 3, "conv_dim": (13, 13), "conv_stride": (5, 2),
    "conv_kernel": (10, 3), "squeeze_factor": 2, "position_buckets": 16,
}  # fmt: skip
DISENTANGLED_MODELS = {
    "deberta": ("DebertaModel", "encoder.layer.{}.attention", {}, lambda: {"input_ids": tokens()}),
    "deberta-v2": ("DebertaV2Model", "encoder.layer.{}.attention", {}, lambda: {"input_ids": tokens()}),
    "sew-d": (
        "SEWDModel", "encoder.encoder.layer.{}.attention", SEW_D, lambda: {"input_values": torch.randn(2, 260)},
    ),
}  # fmt: skip


def disentangled(kind, positions=("c2p", "p2c")):
    model, paths, settings, inputs = DISENTANGLED_MODELS[kind]
    size = {"hidden_size": 66, "num_attention_heads": 6}  # 11 a head; SEW-D convolves in three groups, two to a frame
    settings = ENCODER | size | {"relative_attention": True, "pos_att_type": list(positions)} | settings
    scale = ((1 + len(positions)) * 11) ** -0.5
    return Published((kind,), model, settings, layers(paths, scale), inputs)


GEMMA = {
    "vocab_size": 101, "vocab_size_per_layer_input": 101, "hidden_size": 48, "num_hidden_layers": 2, "head_dim": 20,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_kv_shared_layers": 0, "max_position_embeddings": 64,
    "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0,
}  # fmt: skip
MODELS = [
    t5_like("t5", "T5Model"),
    t5_like("mt5", "MT5Model"),
    t5_like("umt5", "UMT5Model"),
    t5_like("longt5", "LongT5Model", local="LocalSelfAttention", local_radius=3, encoder_attention_type="local"),
    t5_like(
        "longt5", "LongT5Model", local="TransientGlobalSelfAttention", local_radius=3, global_block_size=4,
        encoder_attention_type="transient-global",
    ),
    t5_like(
        "switch_transformers", "SwitchTransformersModel", num_experts=2, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    ),
    t5_like("udop", "UdopModel", a_page, image_size=12, patch_size=3, max_2d_position_embeddings=64),
    t5_like("pop2piano", "Pop2PianoForConditionalGeneration"),
    Published(
        ("pix2struct_vision_model", "pix2struct_text_model"), "Pix2StructForConditionalGeneration",
        {"vision_config": {"hidden_size": 33, "d_kv": 11, "num_attention_heads": 3, "num_hidden_layers": 2,
                           "d_ff": 47, "patch_embed_hidden_size": 12, "seq_len": 16},
         "text_config": {"hidden_size": 33, "d_kv": 3, "num_heads": 11, "num_layers": 2, "d_ff": 47, **TOKENS}},
        layers("encoder.encoder.layer.{}.attention", 1.0)
        | layers("decoder.layer.{}.self_attention.attention", 1.0)
        | layers("decoder.layer.{}.encoder_decoder_attention.attention", 1.0),
        patches,
    ),
    Published(
        ("gpt_neo",), "GPTNeoModel",
        {"hidden_size": 57, "num_heads": 3, "num_layers": 2, "attention_types": [[["global", "local"], 1]],
         "window_size": 5, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, **TOKENS},
        layers("h.{}.attn.attention", 1.0),
        lambda: {"input_ids": tokens()},
    ),
    Published(
        ("dia_encoder", "dia_decoder"), "DiaModel",
        {"encoder_config": {"hidden_size": 33, "intermediate_size": 47, "num_hidden_layers": 2, "head_dim": 10,
                            "num_attention_heads": 3, "num_key_value_heads": 3, **TOKENS},
         "decoder_config": {"hidden_size": 39, "intermediate_size": 47, "num_hidden_layers": 2, "head_dim": 12,
                            "num_attention_heads": 3, "num_key_value_heads": 1, "cross_num_attention_heads": 3,
                            "cross_num_key_value_heads": 3, "cross_head_dim": 14, "cross_hidden_size": 33,
                            "num_channels": 2, **TOKENS},
         "delay_pattern": [0, 1], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        layers("encoder.layers.{}.self_attention", 1.0)
        | layers("decoder.layers.{}.self_attention", 1.0)
        | layers("decoder.layers.{}.cross_attention", 1.0),
        lambda: {"input_ids": tokens(), "decoder_input_ids": torch.randint(3, 101, (2, 7, 2))},
    ),
    Published(
        ("gemma3n_text",), "Gemma3nTextModel",
        {**GEMMA, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "altup_num_inputs": 2,
         "activation_sparsity_pattern": [0.0, 0.0], "intermediate_size": [32, 32]},
        layers("layers.{}.self_attn", 1.0),
        lambda: {"input_ids": tokens()},
    ),
    Published(
        ("gemma4_text",), "Gemma4TextModel",
        {**GEMMA, "hidden_size_per_layer_input": 0, "global_head_dim": 20, "intermediate_size": 32},
        layers("layers.{}.self_attn", 1.0),
        lambda: {"input_ids": tokens()},
    ),
    *map(disentangled, DISENTANGLED_MODELS),
    Published(
        ("inkling_text",), "InklingTextModel",
        {"hidden_size": 33, "intermediate_size": 47, "num_hidden_layers": 2, "num_attention_heads": 3,
         "num_key_value_heads": 1, "head_dim": 11, "swa_num_attention_heads": 3, "swa_num_key_value_heads": 1,
         "swa_head_dim": 13, "d_rel": 5, "rel_extent": 17, "sliding_window_size": 5, "local_layer_ids": [0],
         "mlp_layer_types": ["dense", "dense"], **TOKENS},
        {"layers.0.self_attn": 1 / 13, "layers.1.self_attn": 1 / 11},
        lambda: {"input_ids": tokens()},
    ),
    Published(
        ("cvt",), "CvtModel", {"embed_dim": [14, 22, 33], "num_heads": [1, 2, 3], "depth": [1, 2, 3]},
        {f"encoder.stages.{stage}.layers.{index}.attention": width**-0.5
         for stage, width in enumerate([14, 22, 33]) for index in range(stage + 1)},
        lambda: {"pixel_values": torch.randn(2, 3, 32, 32)},
    ),
]  # fmt: skip


def test_every_entry_has_a_model_here():
    assert {kind for model in MODELS for kind in model.kinds} == UNSCALED | DISENTANGLED | BY_DIM | BY_WIDTH


@pytest.mark.parametrize("published", MODELS, ids=lambda published: "+".join(published.kinds))
def test_an_architecture_applies_the_scale_it_is_published_with(published):
    exceptions = set()
    for path, layer in published.watched().items():
        said = layer.declared
        assert said.scale_authority is Authority.CONFIGURED, path
        assert layer.scale_applied == pytest.approx(published.layers[path], rel=1e-5), path
        assert said.scale == pytest.approx(published.layers[path], rel=1e-12), path
        exceptions |= {said.scale_source} if said.scale != pytest.approx(layer.head_dim**-0.5) else set()
    assert exceptions == {f"the published {kind}" for kind in published.kinds}


@pytest.mark.parametrize("kind", sorted(DISENTANGLED))
@pytest.mark.parametrize("positions", [(), ("c2p",), ("p2c",)])
def test_each_sum_of_a_disentangled_score_is_counted(kind, positions):
    published = disentangled(kind, positions)
    for path, layer in published.watched().items():
        expected = pytest.approx(published.layers[path], rel=1e-5)
        assert (layer.scale_applied, layer.declared.scale) == (expected, expected), path


def test_a_scale_written_over_in_a_model_scaled_by_width_is_not_the_published_one():
    (cvt,) = (published for published in MODELS if published.kinds == ("cvt",))
    model = transformers.CvtModel(transformers.CvtConfig(**cvt.settings))
    path = "encoder.stages.2.layers.0.attention.attention"
    model.get_submodule(path).scale = 1.0
    assert declared(model, path, 11).scale == pytest.approx(33**-0.5)


@pytest.mark.parametrize("config", [{"model_type": "t5"}, SimpleNamespace(model_type="t5")])
def test_an_architecture_is_known_by_its_name_however_the_configuration_is_kept(config):
    model = nn.Module()
    model.config = config
    assert declared(model, "", 11).scale == 1.0
