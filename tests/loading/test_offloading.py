"""A model larger than memory runs from disk, through accelerate, with the same output and the same check."""

import gc
import json
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import parse
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CLIPConfig,
    CLIPModel,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTModel,
)

from attnscale.checking import check_model
from attnscale.errors import ModelError
from attnscale.loading import Request, load_model
from attnscale.loading.model_errors import quiet
from tests.loading.conftest import hide

needs_offloading = pytest.mark.skipif(
    parse(transformers.__version__) < parse("5.13"), reason="it has no such offloading"
)
SIZES = dict(hidden_size=44, num_hidden_layers=3, num_attention_heads=2, intermediate_size=53)
TEXT = dict(SIZES, vocab_size=101, num_key_value_heads=1)
PART = dict(SIZES, projection_dim=16)
MODELS = {
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES, vocab_size=101)),
    "blocks of other names in the file": lambda: ViTModel(ViTConfig(**SIZES, image_size=16, patch_size=8)),
    "experts put together of several tensors": lambda: MixtralForCausalLM(
        MixtralConfig(**TEXT | dict(hidden_size=32, intermediate_size=48), num_local_experts=3)
    ).to(torch.bfloat16),
    "parameters outside of every layer": lambda: CLIPModel(
        CLIPConfig(
            text_config=PART | dict(vocab_size=101, max_position_embeddings=19),
            vision_config=PART | dict(image_size=30, patch_size=15),
            projection_dim=16,
        )
    ),
}


def save(model, folder, size="30KB"):
    """Save a model with norms as training leaves them."""
    torch.manual_seed(0)
    with torch.no_grad(), quiet():
        for module in model.modules():
            if "norm" in type(module).__name__.lower():
                module.weight += 0.1 * torch.randn_like(module.weight)
        model.save_pretrained(folder, max_shard_size=size)
    return Request(str(folder), length=11)


@pytest.fixture
def without_memory(monkeypatch):
    return lambda: monkeypatch.setattr("attnscale.loading.weights.free_memory", lambda device: 1000)


@needs_offloading
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_model_from_disk_gives_the_same_output_and_the_same_check(make, tmp_path, without_memory):
    torch.manual_seed(0)
    request = save(make(), tmp_path)
    whole, expected = load_model(request), check_model(request)
    without_memory()
    part, found = load_model(request), check_model(request)
    assert all(parameter.is_meta for parameter in part.model.parameters() if parameter.dim() > 1)
    with torch.no_grad():
        assert torch.equal(whole.model(**whole.kwargs)[0], part.model(**whole.kwargs)[0])
    assert all(parameter.is_meta for parameter in part.model.parameters() if parameter.dim() > 1)
    assert expected.audit.trained
    assert json.dumps(found.to_dict()) == json.dumps(expected.to_dict())


@needs_offloading
def test_one_file_of_weights_is_run_from_disk_and_leaves_nothing_behind(tmp_path, without_memory, monkeypatch):
    folder = tmp_path / "model"
    request = save(MODELS["bert"](), folder, "1GB")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (folder / "model.safetensors").rename(folder / "own.safetensors")
    (folder / "adapter_config.json").write_text("not read", encoding="ascii")
    (folder / "generation_config.json").write_text("not read", encoding="ascii")
    without_memory()
    loaded = load_model(request)
    assert {path.name for path in next(Path(tmp_path / "tmp").iterdir()).iterdir()} == {
        "model.safetensors",
        "generation_config.json",
    }
    del loaded
    gc.collect()
    assert not list((tmp_path / "tmp").iterdir())


def test_a_model_that_cannot_run_from_disk_is_refused(bert, without_memory, monkeypatch):
    without_memory()
    hide(monkeypatch, "accelerate")
    with pytest.raises(ModelError, match=r"needs the package accelerate: pip install 'attnscale\[hf\]'"):
        load_model(Request(str(bert)))
    (bert / "model.safetensors").rename(bert / "pytorch_model.bin")
    with pytest.raises(ModelError, match="Out of memory"):
        load_model(Request(str(bert)))
