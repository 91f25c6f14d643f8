"""Folders and files that are no model, or that could do harm, are refused in one sentence, and none of them is run."""

import json
import pickle
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from attnscale.errors import AttnscaleError, ModelError
from attnscale.loading import Request, load_model

KEY = "bert.encoder.layer.1.attention.self.key.weight"
CODE = r"Refused .*could run code. Save the weights as safetensors"


class Bomb:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return (open, ("ran", "w"))


def change(folder, name, tensor=None):
    weights = load_file(folder / "model.safetensors")
    weights.pop(name, None)
    save_file(weights | ({} if tensor is None else {name: tensor}), folder / "model.safetensors")


def cut(path, share):
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])


def bare(content, path):
    path.write_bytes(pickle.dumps(content))


def pickled(folder, content, write=torch.save, share=1.0):
    (folder / "model.safetensors").unlink()
    write(content, folder / "pytorch_model.bin")
    cut(folder / "pytorch_model.bin", share)


def index(folder, file, kind="model.safetensors"):
    (folder / "model.safetensors").unlink()
    (folder / f"{kind}.index.json").write_text(json.dumps({"weight_map": {KEY: file}}), encoding="utf-8")


def shard_with_code(folder):
    bare(Bomb(), folder / "shard.bin")
    index(folder, "shard.bin", "pytorch_model.bin")


def missing_shard(folder):
    load_model(Request(str(folder))).model.save_pretrained(folder / "cut", max_shard_size="30KB")
    min((folder / "cut").glob("model-*.safetensors")).unlink()
    return folder / "cut"


def compressed(folder):
    pickled(folder, {"weight": torch.zeros(10**6)})
    path = (folder / "pytorch_model.bin").rename(folder / "plain")
    with zipfile.ZipFile(path) as plain:
        entries = {entry.filename: plain.read(entry) for entry in plain.infolist()}
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in entries.items():
            packed.writestr(name, content)
    assert (folder / "pytorch_model.bin").stat().st_size < 10**5


def configuration(folder, content):
    (folder / "config.json").write_bytes(content)


def alone(folder, name, content):
    """Return the path of a file without a configuration beside it."""
    (folder / "alone").mkdir()
    (folder / "alone" / name).write_bytes(content)
    return folder / "alone" / name


# what is done to a model's folder, or the path to load instead; and the sentence
REFUSED = {
    "a missing weight": (lambda f: change(f, KEY), f"do not fit the configuration: '{KEY}' is missing"),
    "another shape": (lambda f: change(f, KEY, torch.zeros(3, 44)), rf"'{KEY}' of shape \(44, 44\), got \(3, 44\)"),
    "a layer too many": (lambda f: change(f, KEY.replace(".1.", ".2."), torch.zeros(44, 44)), "the model has no 'bert"),
    "empty safetensors": (lambda f: cut(f / "model.safetensors", 0.0), r"model\.safetensors .*truncated or damaged"),
    "half of safetensors": (lambda f: cut(f / "model.safetensors", 0.5), r"model\.safetensors .*truncated or damaged"),
    "an empty pickle": (lambda f: pickled(f, {}, share=0.0), r"pytorch_model\.bin .*truncated or damaged"),
    "most of a pickle": (lambda f: pickled(f, {"a": torch.ones(9)}, share=0.99), r"pytorch_model\.bin .*truncated"),
    "a missing shard": (missing_shard, r"model-00001-of-\d+\.safetensors beside .* is missing"),
    "a shard above": (lambda f: index(f, "../secret.safetensors"), "to lie beside it"),
    "a shard elsewhere": (lambda f: index(f, "/etc/secret.safetensors"), "to lie beside it"),
    "a shard below": (lambda f: index(f, "sub/x.safetensors"), "to lie beside it"),
    "a pickle with code": (lambda f: pickled(f, Bomb(), bare), CODE),
    "a pickle of torch with code": (lambda f: pickled(f, {"weight": torch.zeros(2), "more": Bomb()}), CODE),
    "code without a configuration": (lambda f: alone(f, "model.pt", pickle.dumps(Bomb())), CODE),
    "a shard with code": (shard_with_code, CODE),
    "a compressed archive": (compressed, r"Refused .*it is compressed"),
    "an expanded tensor": (lambda f: pickled(f, {"a": torch.zeros(1).expand(10**12)}), "'a' is sparse or expanded"),
    "half of JSON": (lambda f: configuration(f, b"{"), "Expected JSON in"),
    "no UTF-8": (lambda f: configuration(f, b"\xff\xfe"), "Expected JSON in"),
    "a list": (lambda f: configuration(f, b"[]"), "with a 'model_type'"),
    "an unknown type": (lambda f: configuration(f, b'{"model_type": "none"}'), "Unknown model_type 'none'"),
    "seven heads": (lambda f: configuration(f, b'{"model_type": "bert", "num_attention_heads": 7}'), "not a multiple"),
    "a width that is a word": (
        lambda f: configuration(f, b'{"model_type": "bert", "hidden_size": "w"}'),
        "not build a",
    ),
    "no configuration": (lambda f: (f / "config.json").unlink(), "Expected a config.json in"),
    "nothing": (lambda f: f / "nowhere", "no such file or folder"),
    "a name that is not cached": (lambda f: "google/bert", "Add --download to fetch it"),
    "a text": (lambda f: alone(f, "notes.txt", b"hello"), r"got the file .*notes\.txt"),
    "weights alone": (
        lambda f: alone(f, "alone.safetensors", save({"a": torch.zeros(2)})),
        r"alone\.safetensors holds weights alone.*package\.module:callable, which",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_no_model_is_refused_in_one_sentence_and_not_run(bert, case, monkeypatch):
    monkeypatch.chdir(bert)
    spoil, sentence = REFUSED[case]
    with pytest.raises(ModelError, match=sentence) as caught:
        load_model(Request(str(spoil(bert) or bert)))
    assert "\n" not in str(caught.value)
    assert not (bert / "ran").exists()


def test_a_gguf_file_in_a_folder_is_given_by_itself(bert):
    (bert / "model.safetensors").rename(bert / "model.gguf")
    with pytest.raises(ModelError, match=r"found model\.gguf; give the GGUF file itself"):
        load_model(Request(str(bert)))


@pytest.mark.parametrize(
    "options", [{"length": 1}, {"text": "x"}, {"device": "tpu"}, {"device": "cuda:99"}, {"device": ""}]
)
def test_settings_out_of_range_get_one_sentence(options):
    with pytest.raises(AttnscaleError, match=r"^(Expected|Could not)"):
        load_model(Request(**options))
