"""A model larger than memory: read block by block, under a limit on memory, with the numbers of the whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)
from transformers.utils import logging

from attnscale.checking import check_model
from attnscale.loading import Request

PATHS = filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH")))
ENVIRONMENT = os.environ | {"PYTHONIOENCODING": "utf-8", "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
WIDTH, LAYERS = 768, 8
BLOCK = (4 * WIDTH**2 + 3 * WIDTH * 4 * WIDTH) * 4  # bytes: attention and a gated network, float32
# Runs a check with so many bytes left to the process for data, beyond what importing takes.
LIMITED = """
import json, resource, sys, torch
from attnscale.checking import check_model
from attnscale.loading import Request
import attnscale.loading.huggingface, transformers, attnscale.loading.streaming
transformers.LlamaForCausalLM, transformers.BertForMaskedLM
torch.nn.Linear(64, 64)(torch.zeros(64, 64))
used = [int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData:")][0]
resource.setrlimit(resource.RLIMIT_DATA, (used + int(sys.argv[2]),) * 2)
checked = check_model(Request(sys.argv[1], length=32))
print(json.dumps(checked.to_dict()["layers"]))
"""


def limited(folder, left):
    command = [sys.executable, "-c", LIMITED, str(folder), str(left)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=ENVIRONMENT, check=False)


def checked_here(folder):
    """The same without a limit, on one thread too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return json.loads(json.dumps(check_model(Request(str(folder), length=32)).to_dict()["layers"]))
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A Llama of 8 blocks, 304 MB, in shards."""
    folder = tmp_path_factory.mktemp("large")
    logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes = dict(hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=12)
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=512, tie_word_embeddings=True))
    model.save_pretrained(folder, max_shard_size="75MB")
    logging.enable_progress_bar()
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process's data are Linux's")
def test_a_model_that_does_not_fit_is_read_block_by_block(large):
    left = 4 * BLOCK  # of eight: two for weights, two for what runs
    part = limited(large, left)
    assert part.returncode == 0, part.stderr[-2000:]
    assert json.loads(part.stdout) == checked_here(large)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process's data are Linux's")
def test_one_whose_blocks_do_not_fit_is_refused_in_a_sentence(large):
    ended = limited(large, int(2.2 * BLOCK))
    assert ended.returncode == 1
    assert "Out of memory: the model's weights take" in ended.stderr.splitlines()[-1]


def test_a_streamed_model_holds_two_blocks_and_gives_the_same_output(tmp_path, monkeypatch):
    from attnscale.loading import load_model
    from attnscale.loading.streaming import is_here

    logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes = dict(hidden_size=44, num_hidden_layers=5, num_attention_heads=4, intermediate_size=53, vocab_size=101)
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(tmp_path)
    logging.enable_progress_bar()
    whole = load_model(Request(str(tmp_path)))
    monkeypatch.setattr("attnscale.loading.huggingface._is_streamed", lambda *given: True)
    part = load_model(Request(str(tmp_path)))
    matrices = [parameter for parameter in part.model.bert.encoder.parameters() if parameter.dim() > 1]
    most = []
    for block in part.model.bert.encoder.layer:
        block.register_forward_hook(lambda *given: most.append(sum(map(is_here, matrices))))
    with torch.no_grad():
        torch.testing.assert_close(part.model(**part.kwargs).logits, whole.model(**whole.kwargs).logits, rtol=0, atol=0)
    assert len(most) == 5
    assert max(most) <= 2 * len(matrices) / 5
    assert not any(map(is_here, matrices))


SIZES = dict(hidden_size=44, num_hidden_layers=3, num_attention_heads=2, intermediate_size=53)
MODELS = {
    "keys that queries share, in bfloat16": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=101, tie_word_embeddings=True)
    ).bfloat16(),
    "a head of another name in the file": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, vocab_size=101)),
    "blocks of other names in the file": lambda: ViTModel(ViTConfig(**SIZES, image_size=16, patch_size=8)),
    "an encoder and a decoder": lambda: T5ForConditionalGeneration(
        T5Config(d_model=44, d_kv=11, d_ff=53, num_layers=2, num_heads=4, vocab_size=101, decoder_start_token_id=0)
    ),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_other_architectures_are_streamed_from_shards_with_the_same_output(make, tmp_path, monkeypatch):
    from attnscale.loading import load_model
    from attnscale.loading.streaming import is_here

    logging.disable_progress_bar()
    torch.manual_seed(0)
    make().save_pretrained(tmp_path, max_shard_size="30KB")
    logging.enable_progress_bar()
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole = load_model(Request(str(tmp_path), length=11))
    monkeypatch.setattr("attnscale.loading.huggingface._is_streamed", lambda *given: True)
    part = load_model(Request(str(tmp_path), length=11))
    matrices = [value for name, value in part.model.named_parameters() if value.dim() > 1 and ".0." in name]
    assert matrices
    assert not any(map(is_here, matrices))
    with torch.no_grad():
        expected, found = (loaded.model(**whole.kwargs)[0] for loaded in (whole, part))
    assert torch.equal(expected, found)
