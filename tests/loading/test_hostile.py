"""Models that would take forever or all memory are refused in one sentence, before anything is built."""

import json
import os
import sys
import time

import psutil
import pytest

from attnscale.cli import main
from attnscale.errors import ModelError
from attnscale.loading import Request, load_model

GPT2 = dict(model_type="gpt2", vocab_size=103, n_embd=44, n_layer=2, n_head=2, n_positions=61)


@pytest.fixture(autouse=True)
def _imported():
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401  # which is not what takes the second


def refused(*arguments, monkeypatch, capsys):
    """Status and sentence of `attnscale check …`, which takes less than a second and 200 MB."""
    monkeypatch.setattr(sys, "argv", ["attnscale", "check", *map(str, arguments)])
    before, start = psutil.Process().memory_info().rss, time.process_time()
    with pytest.raises(SystemExit) as ended:
        main()
    assert time.process_time() - start < 1.0
    assert psutil.Process().memory_info().rss - before < 200e6
    return ended.value.code, capsys.readouterr().err


CONFIGURATIONS = {
    "a million layers": (json.dumps(GPT2 | {"n_layer": 10**6}), "'n_layer' of at most 4,096"),
    "layers of a part": (
        json.dumps({"model_type": "clip", "text_config": {"num_hidden_layers": 10**6}}),
        "'num_hidden_layers' of at most 4,096",
    ),
    "an infinity of layers": (json.dumps(GPT2).replace('"n_layer": 2', '"n_layer": 1e400'), "got inf"),
    "a billion tokens": (json.dumps(GPT2 | {"vocab_size": 10**11}), "Out of memory"),
    "900 lists in one another": (
        json.dumps(GPT2)[:-1] + ', "x": ' + "[" * 900 + "]" * 900 + "}",
        "nested too deeply",
    ),
    "100,000 lists in one another": ("[" * 100_000, "recursion"),
    "a number of 10,000 digits": (json.dumps(GPT2)[:-1] + ', "n_inner": ' + "9" * 10_000 + "}", "Exceeds the limit"),
    "half of a character": (json.dumps(GPT2 | {"model_type": "gpt\ud800"}), "Unknown model_type 'gpt\\ud800'"),
}


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_a_configuration_is_refused_by_what_it_declares(tmp_path, monkeypatch, capsys, kind):
    content, sentence = CONFIGURATIONS[kind]
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    status, told = refused(tmp_path / "config.json", monkeypatch=monkeypatch, capsys=capsys)
    assert status == 2
    assert sentence in told
    assert told.count("\n") == 1


def test_a_length_beyond_every_context_is_refused(monkeypatch, capsys):
    assert refused("--length", 10**12, monkeypatch=monkeypatch, capsys=capsys) == (
        2,
        "attnscale: Expected --length from 2 to 1,048,576, got 1000000000000.\n",
    )


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with a name")
def test_pipes_and_devices_are_refused_without_waiting(tmp_path, monkeypatch, capsys):
    os.mkfifo(tmp_path / "pipe.json")
    for arguments in (["--text", "/dev/zero"], ["--text", tmp_path / "pipe.json"], [tmp_path / "pipe.json"]):
        status, told = refused(*arguments, monkeypatch=monkeypatch, capsys=capsys)
        assert status == 2
        assert "is not a regular file." in told


def test_weights_that_do_not_fit_are_refused_by_the_size_of_their_file(tmp_path, monkeypatch):
    monkeypatch.setattr("attnscale.loading.weights.free_memory", lambda device: 2**30)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2**33)  # which takes no room on the disk
    with pytest.raises(ModelError, match=r"Out of memory: the model's weights take 8\.0 GiB, and 1\.0 GiB are free"):
        load_model(Request(str(tmp_path / "model.safetensors")))
