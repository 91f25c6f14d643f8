import json
import runpy
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attnscale.models import decode, default_text, encode, load_bundled
from attnscale.models.bundled import WEIGHTS, about_bundled, split

TRAINING = Path(__file__).parent.parent.parent / "scripts" / "train_bundled_model.py"


def test_the_weights_are_at_most_four_megabytes():
    assert 0 < len(WEIGHTS.read_bytes()) <= 4_000_000


def test_it_reaches_the_loss_its_file_records_on_text_it_was_not_trained_on():
    model, _ = load_bundled()
    loss = runpy.run_path(str(TRAINING))["loss"](model, split(default_text())[1][:5140])
    recorded = float(about_bundled()["held_out_loss_nats_per_byte"])
    assert recorded < 1.2
    # 20 windows of some text, in whichever edition of it this Python ships; untrained it is ln 256 = 5.5 and more
    assert loss == pytest.approx(recorded, abs=0.35)


def test_the_example_is_text_it_can_be_called_on():
    model, tokens = load_bundled()
    assert tokens.shape == (1, model.context)
    assert decode(tokens[0]).isprintable() or "\n" in decode(tokens[0])
    with torch.inference_mode():
        assert model(tokens).isfinite().all()
    assert not model.training


def test_the_file_says_how_it_was_made():
    about = about_bundled()
    assert {"shape", "seed", "steps", "corpus", "corpus_sha256", "torch"} <= about.keys()
    assert json.loads(about["shape"])["vocabulary"] == 256


def test_bytes_come_back_as_text():
    assert decode(encode("softmax(QKᵀ/√d_k)")) == "softmax(QKᵀ/√d_k)"
    assert len(default_text()) > 400_000


def test_training_twice_with_a_seed_gives_the_same_weights(tmp_path, monkeypatch):
    script = runpy.run_path(str(TRAINING))
    main = script["main"]
    main.__globals__.update(STEPS=2, BATCH=2)
    for name in ("first", "second"):
        monkeypatch.setattr("sys.argv", ["bundled.py", str(tmp_path / name)])
        main.__globals__["loss"] = lambda model, tokens: 0.0
        main()
    first, second = load_file(tmp_path / "first"), load_file(tmp_path / "second")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_weights_lie_in_the_package():
    assert (files("attnscale") / "models" / "bundled.safetensors").is_file()
