"""Scales that are folded: the scores afterwards are those of the rule, and calibrated ones have unit spread."""

import copy

import pytest
import torch
from torch import nn

import attnscale
from attnscale.errors import InputError, SettingError

from ..zoo import CORRECT, ENTRIES
from .models import (
    D_MODEL,
    HEAD_DIM,
    HEADS,
    Normed,
    assert_changed_as_told,
    batch,
    before_and,
    made,
    maxima,
    touched,
    watched,
)

RULES = {
    "inverse_sqrt": HEAD_DIM**-0.5,
    "unscaled": 1.0,
    "inverse_dim": 1 / HEAD_DIM,
    "mup": 64**0.5 / HEAD_DIM,
    "temperature:7": 1 / 7,
    "yarn:4": (0.1 * 1.3862943611198906 + 1) ** 2 * HEAD_DIM**-0.5,
}


@pytest.mark.parametrize("rule", RULES)
def test_folded_scores_are_those_of_the_rule(rule):
    model, inputs = made(), batch()
    was, before = watched(model, inputs).layers["Attention"], before_and(model)
    report = attnscale.rescale_(model, rule, inputs)
    now = watched(model, inputs).layers["Attention"]
    torch.testing.assert_close(now.stats.max, was.stats.max * RULES[rule] * HEAD_DIM**0.5, rtol=1e-5, atol=1e-6)
    assert [head.after for head in report.heads] == pytest.approx([RULES[rule]] * len(report.heads))
    assert len(report.heads) == (0 if rule == "inverse_sqrt" else HEADS)
    assert_changed_as_told(before, model, touched(report))


MULTIPLIERS = ["fused.OwnScale", *(f"products.{name}" for name in ("ScaleIsADivisor", "ScaleIsABuffer", "FourthRoots"))]


@pytest.mark.parametrize("name", MULTIPLIERS)
def test_the_number_that_a_module_scales_by_stays_and_the_weights_take_the_ratio(name):
    model, inputs = CORRECT[name].build()
    (layer,) = watched(model, inputs).layers.values()
    before, buffers = before_and(model), copy.deepcopy(dict(model.named_buffers()))
    report = attnscale.rescale_(model, 0.7, inputs)
    assert all(torch.equal(each, buffers[name]) for name, each in model.named_buffers())
    assert [head.after for head in report.heads] == pytest.approx([0.7] * layer.heads)
    torch.testing.assert_close(maxima(model, inputs), layer.stats.max * 0.7 / layer.scale_applied, rtol=1e-4, atol=1e-6)
    assert_changed_as_told(before, model, touched(report))


def test_a_batch_is_found_for_models_that_say_what_they_take():
    assert len(attnscale.rescale_(nn.MultiheadAttention(D_MODEL, HEADS), 1.0).heads) == HEADS
    with pytest.raises(InputError, match="batch"):
        attnscale.rescale_(made(), 1.0)


@pytest.mark.parametrize(
    "rule", ["calibrated", "log_length", "QKNorm", torch.ones(1), attnscale.rules.LearnedTemperature(5), 0.0]
)
def test_a_rule_that_is_no_number_cannot_be_folded(rule):
    model, inputs = made(), batch()
    before = before_and(model)
    with pytest.raises(SettingError):
        attnscale.rescale_(model, rule, inputs)
    assert_changed_as_told(before, model, [])


CALIBRATED = [
    "fused.Plain", "fused.Grouped", "products.AsPrinted", "positions.RotaryHalves", "structures.CompressedKeys",
    "layouts.HeadsThreeDim", "norms_and_caps.NormBeforeTheSplit", "structures.Deep", "torch_modules.Encoder",
    *(name for name in CORRECT if name.startswith("unbatched.") and "GptOss" not in name),  # a sink is not scaled
]  # fmt: skip


@pytest.mark.parametrize("name", CALIBRATED)
def test_calibrated_scores_have_unit_spread_in_every_head(name):
    model, inputs = CORRECT[name].build()
    before = before_and(model)
    report = attnscale.calibrate_(model, inputs)
    for layer in watched(model, inputs).layers.values():
        torch.testing.assert_close(layer.stats.std, torch.ones(layer.heads).double(), rtol=2e-3, atol=0)
        assert {head.head for head in report.heads if head.layer == layer.name} == set(range(layer.heads))
    assert all(head.after == pytest.approx(1.0, abs=2e-3) for head in report.heads)
    assert_changed_as_told(before, model, touched(report))


def test_heads_that_share_a_gain_have_unit_spread_in_the_mean():
    model, inputs = made(Normed), batch()
    attnscale.calibrate_(model, inputs)
    spreads = watched(model, inputs).layers["Normed"].stats.std
    assert float(spreads.log().mean()) == pytest.approx(0.0, abs=2e-3)


def test_calibrating_leaves_every_module_in_its_mode():
    model, inputs = made(), batch()
    model.train().q_proj.eval()
    attnscale.calibrate_(model, inputs)
    assert (model.training, model.q_proj.training, model.k_proj.training) == (True, False, True)


def test_an_audit_knows_what_was_folded_into_the_weights():
    model, inputs = ENTRIES["bugs_of_scale.NoMultiplication"].build()
    assert {finding.code for finding in attnscale.audit(model, *inputs).findings} >= {"unscaled"}
    attnscale.rescale_(model, "inverse_sqrt", inputs)
    for found in (model, copy.deepcopy(model)):
        assert attnscale.audit(found, *inputs).findings == []
        assert attnscale.audit(found, *inputs).layers["attention"].declared.folded == pytest.approx(31**-0.5)


def test_a_scale_of_a_module_with_several_depths_is_folded_once():
    model, inputs = ENTRIES["structures.Shared"].build()
    attnscale.rescale_(model, 0.5 * 11**-0.5, inputs)
    assert attnscale.audit(model, *inputs).layers["block.attention[0]"].declared.folded == pytest.approx(0.5)


@pytest.mark.parametrize("name", [name for name in CORRECT if name.startswith("unbatched.")])
def test_what_if_runs_in_bfloat16_without_a_batch_axis(name):
    model, inputs = CORRECT[name].build()
    audit = attnscale.audit(model.bfloat16(), *(x.bfloat16() for x in inputs))
    assert audit.what_if("attention")["current"].spread > 0
