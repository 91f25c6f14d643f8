"""Folders as they are saved: the right model with the right weights, or one sentence."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM

from attnscale.errors import ModelError, SettingError
from attnscale.loading import Request, load_model


def load(path, **options):
    return load_model(Request(str(path), **options))


def test_a_folder_gives_the_model_that_transformers_loads(bert):
    loaded = load(bert)
    expected = AutoModelForMaskedLM.from_pretrained(bert)
    assert type(loaded.model) is type(expected)
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), expected.parameters(), strict=True))
    assert not loaded.model.training
    assert loaded.kwargs["input_ids"].shape == (1, 89)  # as many as it has positions
    assert "random" in loaded.input_description


def test_shards_and_a_pickle_of_tensors_give_the_same_model(bert, tmp_path):
    whole = load(bert).model
    whole.save_pretrained(tmp_path / "cut", max_shard_size="30KB")
    assert (tmp_path / "cut" / "model.safetensors.index.json").is_file()
    torch.save(load_file(bert / "model.safetensors"), bert / "pytorch_model.bin")
    (bert / "model.safetensors").unlink()
    for folder in (tmp_path / "cut", bert):
        again = load(folder).model
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_safetensors_are_preferred_to_a_pickle(bert):
    saved = load_file(bert / "model.safetensors")["bert.encoder.layer.0.attention.self.query.weight"]
    (bert / "pytorch_model.bin").write_bytes(b"not looked at")
    assert torch.equal(load(bert).model.bert.encoder.layer[0].attention.self.query.weight, saved)


def test_a_config_alone_gives_random_weights_the_same_every_time(bert):
    first, second = load(bert / "config.json"), load(bert, random_init=True)
    saved = load_file(bert / "model.safetensors")["bert.encoder.layer.0.attention.self.query.weight"]
    weights = [loaded.model.bert.encoder.layer[0].attention.self.query.weight for loaded in (first, second)]
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], saved)
    assert "random initialisation" in first.title
    assert first.notes == ("No tokenizer could be read, so the tokens are random.",)


def test_a_folder_without_weights_is_random_and_says_so(bert):
    (bert / "model.safetensors").unlink()
    assert "no weights" in load(bert).notes[0]


def test_weights_of_another_task_load_without_their_head(bert, configure):
    configure(architectures=["BertModel"])
    assert type(load(bert).model).__name__ == "BertModel"


def test_length_is_held_to_the_positions_the_model_has(bert):
    assert load(bert, length=7).kwargs["input_ids"].shape == (1, 7)
    with pytest.raises(SettingError, match="--length of at most 89"):
        load(bert, length=97)


def test_a_text_is_tokenised_by_the_models_own_tokenizer(bert):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "why": 1, "root": 2, "d": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(bert / "tokenizer.json"))
    loaded = load(bert, text="why root d why not")
    assert loaded.kwargs["input_ids"].tolist() == [[1, 2, 3, 1, 0]]
    assert loaded.notes == ()
    assert loaded.unknown_share == pytest.approx(0.2)
    tokenizer.add_tokens(["far"] + [f"w{i}" for i in range(200)])
    tokenizer.save(str(bert / "tokenizer.json"))
    with pytest.raises(ModelError, match="there is token 204, and the model knows 101 tokens"):
        load(bert, text="w199 why")


KEY = "bert.encoder.layer.1.attention.self.key.weight"


def test_a_model_without_room_is_refused_before_it_is_made(bert, configure, monkeypatch):
    configure(hidden_size=40960, num_hidden_layers=4, num_attention_heads=32, intermediate_size=163840)
    with pytest.raises(ModelError, match=r"Out of memory: .* take [\d,]+\.\d GiB, and"):
        load(bert / "config.json")
    monkeypatch.setattr("attnscale.loading.weights.free_memory", lambda device: 1000)
    with pytest.raises(ModelError, match="Out of memory"):
        load(bert)
