"""Activations of a watched model find the memory that those of the layer before left."""

import statistics
import subprocess
import sys

import pytest

WATCHED = """
import resource
import torch
from torch import nn
import attnscale

width, layers, rounds = 384, 6, 15
block = dict(dim_feedforward=4 * width, batch_first=True)
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 12, **block), layers, enable_nested_tensor=False).eval()
x = torch.randn(1, 512, width)

def faults(run):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def watched():
    with attnscale.watch(model):
        model(x)

with torch.inference_mode():
    watched()
    print(*(faults(watched) for _ in range(rounds)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts faults as Linux tells them")
def test_a_watched_forward_takes_no_new_pages_for_activations():
    """In a process of its own: whether a heap is given back hangs on all that was in it before."""
    run = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, check=True, timeout=300)
    pages_of_a_layer = 2 * 512 * 4 * 384 * 4 // 4096  # its two widest activations, in pages of 4 KB
    assert statistics.median(map(int, run.stdout.split())) < pages_of_a_layer / 8  # a heap grows now and then
