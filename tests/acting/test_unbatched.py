"""Models without a batch axis, and with heads in its place: each head is read, clipped and calibrated for itself."""

import warnings

import pytest
import torch

import attnscale
from attnscale.errors import NotInsideWarning

from ..zoo import CORRECT
from .models import assert_changed_as_told, before_and, between, watched

LAYOUTS = [name for name in CORRECT if name.startswith("unbatched.")]


def maxima(model, inputs):
    return watched(model, inputs).layers["attention"].stats.max


@pytest.mark.parametrize("name", LAYOUTS)
def test_qkclip_lowers_the_heads_over_the_threshold_and_no_others(name):
    model, inputs = CORRECT[name].build()
    before, was = before_and(model), maxima(model, inputs)
    threshold = between(was)
    with warnings.catch_warnings(), attnscale.QKClip(model, threshold) as clip:
        warnings.simplefilter("ignore", NotInsideWarning)
        reports = []
        for _ in range(4):
            model(*inputs).sum().backward()
            reports.append(clip.step())
    clipped = {head.head for report in reports if report is not None for head in report.heads}
    assert clipped == set((was > threshold).nonzero().flatten().tolist()) != set()
    assert_changed_as_told(before, model, [each for head in reports[0].heads for each in head.touched])
    expected = torch.where(was > threshold, threshold, was)
    torch.testing.assert_close(maxima(model, inputs), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_head_is_calibrated(name):
    model, inputs = CORRECT[name].build()
    report = attnscale.calibrate_(model, inputs)
    spreads = watched(model, inputs).layers["attention"].stats.std
    assert len(report.heads) == len(spreads)
    if "GptOss" not in name:  # a sink is no score, and is not scaled
        torch.testing.assert_close(spreads, torch.ones_like(spreads), rtol=2e-3, atol=0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_if_runs_in_bfloat16(name):
    model, inputs = CORRECT[name].build()
    audit = attnscale.audit(model.bfloat16(), *(x.bfloat16() for x in inputs))
    assert audit.what_if("attention")["current"].spread > 0


@pytest.mark.parametrize("name", ["structures.HeadLoop", "structures.HeadLoopOfSDPA", "structures.LayersInOneModule"])
def test_heads_and_layers_in_a_loop_are_clipped_each_by_its_own_maximum(name):
    def each(model):
        return torch.cat([layer.stats.max for layer in watched(model, inputs).layers.values()])

    model, inputs = CORRECT[name].build()
    was = each(model)
    threshold = float(was.sort().values[len(was) // 2])
    with warnings.catch_warnings(), attnscale.QKClip(model, threshold) as clip:
        warnings.simplefilter("ignore", NotInsideWarning)
        for _ in range(4):
            model(*inputs).sum().backward()
            clip.step()
    found = each(model)
    if "Head" in name:
        torch.testing.assert_close(found, was.clamp(max=threshold), rtol=1e-3, atol=1e-4)
    else:  # later layers are given what earlier ones make
        assert float(found.max()) < threshold * 1.01
