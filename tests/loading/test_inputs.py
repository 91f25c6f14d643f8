"""Inputs that a model of each kind runs on, made from its configuration alone."""

import json

import pytest
import torch

from attnscale.errors import ModelError, SettingError
from attnscale.loading import Request, load_model
from attnscale.loading.request import read_examples

TRUNK = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37)
TEXT = TRUNK | {"vocab_size": 103}
VISION = TRUNK | {"image_size": 30, "patch_size": 15}
CLIP = dict(
    text_config=TEXT | {"max_position_embeddings": 19, "projection_dim": 16},
    vision_config=VISION | {"projection_dim": 16},
)
CONFIGS = {
    "gpt2": dict(vocab_size=103, n_embd=32, n_layer=2, n_head=4, n_positions=61),
    "llama": TEXT | {"num_key_value_heads": 2, "max_position_embeddings": 71},
    "roberta": TEXT | {"max_position_embeddings": 43, "pad_token_id": 1},
    "t5": dict(vocab_size=103, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4),
    "bart": dict(
        vocab_size=103, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=37, decoder_ffn_dim=37, max_position_embeddings=53,
    ),
    "opt": TEXT | {"ffn_dim": 37, "word_embed_proj_dim": 32, "max_position_embeddings": 47},
    "vit": VISION,
    "videomae": VISION | {"num_frames": 4, "tubelet_size": 2},
    "clip": CLIP | {"projection_dim": 16},
    "whisper": dict(
        vocab_size=103, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=37, decoder_ffn_dim=37, num_mel_bins=20, max_source_positions=31,
        max_target_positions=23, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    ),
    "wav2vec2": TEXT | {"conv_dim": [16, 16], "conv_stride": [10, 8], "conv_kernel": [10, 8],
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 6, "num_conv_pos_embedding_groups": 2},
    "audio-spectrogram-transformer": TEXT | {"max_length": 60, "num_mel_bins": 24, "patch_size": 8},
}  # fmt: skip


def write(tmp_path, kind, **more):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind} | CONFIGS.get(kind, {}) | more), encoding="utf-8")
    return str(path)


SHAPES = {
    "gpt2": {"input_ids": (1, 61)},
    "llama": {"input_ids": (1, 71)},
    "roberta": {"input_ids": (1, 41)},  # two positions go to the padding token
    "t5": {"input_ids": (1, 256), "decoder_input_ids": (1, 256)},
    "bart": {"input_ids": (1, 53), "decoder_input_ids": (1, 53)},
    "opt": {"input_ids": (1, 47)},
    "vit": {"pixel_values": (1, 3, 30, 30)},
    "videomae": {"pixel_values": (1, 4, 3, 30, 30)},
    "clip": {"pixel_values": (1, 3, 30, 30), "input_ids": (1, 19)},
    "whisper": {"input_features": (1, 20, 62), "decoder_input_ids": (1, 23)},
    "wav2vec2": {"input_values": (1, 16_000)},
    "audio-spectrogram-transformer": {"input_values": (1, 60, 24)},
}


@pytest.mark.parametrize("kind", CONFIGS)
@torch.inference_mode()
def test_a_model_of_each_kind_runs_on_inputs_of_its_sizes(tmp_path, kind):
    loaded = load_model(Request(write(tmp_path, kind)))
    assert loaded.model(**loaded.kwargs)[0].isfinite().all()
    assert {name: tuple(tensor.shape) for name, tensor in loaded.kwargs.items()} == SHAPES[kind]
    assert loaded.input_description


def test_rotary_positions_may_exceed_the_trained_length_with_a_note(tmp_path):
    loaded = load_model(Request(write(tmp_path, "llama"), length=80))
    assert loaded.kwargs["input_ids"].shape == (1, 80)
    assert "made for 71 tokens" in loaded.notes[0]


def test_pictures_have_the_configured_channels_and_the_models_dtype(tmp_path):
    loaded = load_model(Request(write(tmp_path, "vit", num_channels=5, dtype="bfloat16")))
    assert loaded.kwargs["pixel_values"].shape == (1, 5, 30, 30)
    assert loaded.kwargs["pixel_values"].dtype == next(loaded.model.parameters()).dtype


def test_inputs_that_cannot_be_made_are_refused_with_what_to_do(tmp_path):
    with pytest.raises(ModelError, match=r"needs the model's tokenizer"):
        load_model(Request(write(tmp_path, "gpt2"), text="why root d"))
    with pytest.raises(SettingError, match="takes no text"):
        load_model(Request(write(tmp_path, "vit"), text="why root d"))
    with pytest.raises(ModelError, match=r"takes 'past_values', cannot be made here. Give package.module"):
        load_model(Request(write(tmp_path, "patchtst", context_length=16, patch_length=4, d_model=8)))


def test_token_ids_are_run_as_they_are_and_shorter_ones_padded(tmp_path):
    folder = write(tmp_path, "gpt2")
    loaded = load_model(Request(folder, sequences=([5, 6, 7], [8, 9])))
    assert loaded.kwargs["input_ids"][:, :2].tolist() == [[5, 6], [8, 9]]
    assert loaded.kwargs["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert loaded.input_description == "5 tokens of the 2 sequences given"
    alike = load_model(Request(folder, sequences=([5, 6, 7],), length=2))
    assert alike.kwargs["input_ids"].tolist() == [[5, 6]]
    assert "attention_mask" not in alike.kwargs
    with pytest.raises(ModelError, match="the model knows"):
        load_model(Request(folder, sequences=([5, 10**6],)))


def test_examples_are_texts_or_token_ids():
    assert read_examples('{"text": "why"}\n\n{"input_ids": [1, 2]}\n') == ("why", [1, 2])
    for ids in ("7", "[1, -2]", "[1.5, 2]", "[true, false]", "{}", "[[1, 2], 3]"):
        with pytest.raises(SettingError, match=r"Expected at least two token ids, .* in line 1 of --data"):
            read_examples(f'{{"input_ids": {ids}}}')
    for line in ("", "{", "[1, 2]", '{"texts": 1}', '{"input_ids": [1]}', '{"text": ""}', r'{"text": "a \ud800 b"}'):
        with pytest.raises(SettingError, match="--data"):
            read_examples(line)
