"""benchmarks/divergence.py: at a rate that makes plain runs NaN, QKClip keeps them finite, compiled too."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from attnscale.models import default_text, encode

PATH = Path(__file__).parents[2] / "benchmarks" / "divergence.py"
RATE, STEPS = 0.3, 100

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, of what its compiler imports
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(scope="module")
def divergence():
    spec = importlib.util.spec_from_file_location("divergence", PATH)
    sys.modules["divergence"] = module = importlib.util.module_from_spec(spec)  # where the compiler looks for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["divergence"]


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_half_precision_scores_stay_finite_with_qk_clip_compiled(divergence):
    text = encode(default_text())
    plain = divergence.train("none", RATE, 0, STEPS, text, "float16")
    assert not plain["finite"]
    clipped = divergence.train("QK-Clip 100", RATE, 0, plain["steps"] + 5, text, "float16", "aot_eager")
    assert clipped["finite"]
    assert clipped["steps"] == plain["steps"] + 5
    assert clipped["clipped_inside"] is True  # though attention is written out there


@pytest.mark.usefixtures("one_thread")
def test_where_attention_is_a_fused_kernel_it_is_clipped_inside_the_compiled_graph(divergence):
    text = encode(default_text())
    run = divergence.train("QK-Clip 100", RATE, 0, STEPS // 4, text, "float32", "aot_eager")
    assert run["clipped_inside"] is True
    assert run["finite"]
    assert len(run["largest"]) == STEPS // 4 / divergence.EVERY
