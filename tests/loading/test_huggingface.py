"""Folders as they are saved: the right model with the right weights, or one sentence."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM

from attnscale.errors import AttnscaleError, ModelError, SettingError
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


def rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


KEY = "bert.encoder.layer.1.attention.self.key.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda weights: weights.pop(KEY), f"do not fit the configuration: '{KEY}' is missing"),
        (lambda weights: weights.update({KEY: torch.zeros(3, 44)}), rf"'{KEY}' of shape \(44, 44\), got \(3, 44\)"),
        (
            lambda weights: weights.update({KEY.replace(".1.", ".2."): torch.zeros(44, 44)}),
            "the model has no 'bert.encoder.layer.2.attention",
        ),
    ],
    ids=["missing", "wrong shape", "a layer too many"],
)
def test_weights_that_do_not_fit_are_refused(bert, change, sentence):
    rewrite(bert, change)
    with pytest.raises(ModelError, match=sentence):
        load(bert)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_truncated_weights_are_told_wherever_they_end(bert, share, name):
    if name == "pytorch_model.bin":
        torch.save(load_file(bert / "model.safetensors"), bert / name)
        (bert / "model.safetensors").unlink()
    whole = (bert / name).read_bytes()
    (bert / name).write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelError, match=rf"{name}.*(truncated or damaged|Refused)|Refused .*{name}"):
        load(bert)


def test_a_missing_shard_is_named(bert, tmp_path):
    load(bert).model.save_pretrained(tmp_path / "cut", max_shard_size="30KB")
    next(iter(sorted((tmp_path / "cut").glob("model-*.safetensors")))).unlink()
    with pytest.raises(ModelError, match=r"model-00001-of-\d+\.safetensors beside .* is missing"):
        load(tmp_path / "cut")


@pytest.mark.parametrize("elsewhere", ["../secret.safetensors", "/etc/secret.safetensors", "sub/x.safetensors"])
def test_an_index_may_not_point_elsewhere(bert, elsewhere):
    (bert / "model.safetensors").unlink()
    index = {"weight_map": {KEY: elsewhere}}
    (bert / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelError, match="to lie beside it"):
        load(bert)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{", "Expected JSON in"),
        (b"\xff\xfe", "Expected JSON in"),
        (b"[]", "with a 'model_type'"),
        (b'{"model_type": "no-such-model"}', "Unknown model_type 'no-such-model'"),
        (b'{"model_type": "bert", "hidden_size": 10, "num_attention_heads": 3}', "is not a multiple"),
        (b'{"model_type": "bert", "hidden_size": "wide"}', "Could not build a bert model"),
    ],
)
def test_a_configuration_that_is_none_gets_one_sentence(bert, content, sentence):
    (bert / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=sentence) as caught:
        load(bert)
    assert "\n" not in str(caught.value)


def test_folders_and_files_that_are_no_model(tmp_path):
    for path, sentence in [
        (tmp_path, "Expected a config.json in"),
        (tmp_path / "nowhere", "no such file or folder"),
        ("google/bert", "Add --download to fetch it"),
    ]:
        with pytest.raises(ModelError, match=sentence):
            load(path)
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(ModelError, match=r"got the file .*notes\.txt"):
        load(tmp_path / "notes.txt")
    save_file({"a": torch.zeros(2)}, tmp_path / "alone.safetensors")
    with pytest.raises(ModelError, match=r"alone\.safetensors holds weights alone.*package\.module:callable, which"):
        load(tmp_path / "alone.safetensors")
    (tmp_path / "alone.safetensors").rename(tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match=r"found model\.gguf; give the GGUF file itself"):
        load(tmp_path)


def test_a_model_without_room_is_refused_before_it_is_made(bert, configure, monkeypatch):
    configure(hidden_size=40960, num_hidden_layers=4, num_attention_heads=32, intermediate_size=163840)
    with pytest.raises(ModelError, match=r"Out of memory: .* take [\d,]+\.\d GiB, and"):
        load(bert / "config.json")
    monkeypatch.setattr("attnscale.loading.weights.free_memory", lambda device: 1000)
    with pytest.raises(ModelError, match="Out of memory"):
        load(bert)


@pytest.mark.parametrize(
    "options", [{"length": 1}, {"text": "x"}, {"device": "tpu"}, {"device": "cuda:99"}, {"device": ""}]
)
def test_settings_out_of_range_get_one_sentence(options):
    with pytest.raises(AttnscaleError, match=r"^(Expected|Could not)"):
        load_model(Request(**options))
