"""What the everyday takes, in the processor's seconds: on a busy machine the clock tells of others."""

import os
import subprocess
import sys

import pytest

MOST = 3.0  # seconds over the import of torch and of transformers' own class
IMPORTS = ["-c", "import torch; from transformers import BertModel"]


def seconds(*arguments):
    before = os.times()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


@pytest.fixture
def bert(tmp_path):
    """A model on disk; what makes it is read from there as well, and is not read again when the seconds are taken."""
    transformers = pytest.importorskip("transformers")
    shape = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)
    transformers.BertModel(transformers.BertConfig(**shape)).save_pretrained(tmp_path / "bert")
    return str(tmp_path / "bert")


def test_checking_a_small_bert_takes_little_more_than_the_imports(bert, tmp_path):
    imports = seconds(*IMPORTS)
    check = seconds("-m", "attnscale", "check", bert, "--html", str(tmp_path / "report.html"))
    print(f"imports {imports:.2f}, check with a report {check:.2f}")
    assert check - imports < MOST
    assert (tmp_path / "report.html").stat().st_size < 1.5e6
