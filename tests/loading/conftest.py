"""Small Hugging Face models on disk, whole and broken."""

import json
from importlib.util import find_spec

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM
from transformers.utils import logging

SIZES = dict(hidden_size=44, num_hidden_layers=2, num_attention_heads=4, intermediate_size=53, vocab_size=101)


@pytest.fixture(scope="session")
def saved_bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "bert"
    logging.disable_progress_bar()
    torch.manual_seed(11)
    BertForMaskedLM(BertConfig(**SIZES, max_position_embeddings=89)).save_pretrained(folder)
    logging.enable_progress_bar()
    return folder


@pytest.fixture
def bert(saved_bert, tmp_path):
    """A folder of one's own to break."""
    folder = tmp_path / "bert"
    folder.mkdir()
    for file in saved_bert.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def configure(bert):
    def change(**fields):
        path = bert / "config.json"
        config = json.loads(path.read_text(encoding="utf-8")) | fields
        path.write_text(json.dumps(config), encoding="utf-8")

    return change


def hide(monkeypatch, package):
    """Let a package seem not to be installed."""

    def found(name):
        return None if name == package else find_spec(name)

    monkeypatch.setattr("attnscale.loading.model_errors.find_spec", found)
