"""benchmarks/divergence.py: at a rate that makes plain runs NaN, QKClip keeps them finite, compiled too."""

import importlib.util
import sys
from pathlib import Path

import pytest

from attnscale.models import default_text, encode

PATH = Path(__file__).parents[2] / "benchmarks" / "divergence.py"
RATE, STEPS = 0.3, 100


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what its compiler imports
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_half_precision_scores_stay_finite_with_qk_clip_compiled(monkeypatch):
    spec = importlib.util.spec_from_file_location("divergence", PATH)
    divergence = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "divergence", divergence)  # where the compiler looks for it
    spec.loader.exec_module(divergence)
    text = encode(default_text())
    plain = divergence.train("none", RATE, 0, STEPS, text, "float16")
    assert not plain["finite"]
    clipped = divergence.train("QK-Clip 100", RATE, 0, plain["steps"] + 5, text, "float16", "aot_eager")
    assert clipped["finite"]
    assert clipped["steps"] == plain["steps"] + 5
    assert clipped["clipped_inside"] is True  # though attention is written out there
