"""QK-Clip: what passed the threshold meets it, what did not stays as it was to the last bit, whatever the layout."""

import copy
import json
import logging
import math
import time
import warnings

import pytest
import torch
from torch import nn

import attnscale
from attnscale.errors import InputError, NotInsideWarning, SettingError

from ..zoo import CORRECT
from .models import (
    D_MODEL,
    HEAD_DIM,
    HEADS,
    WAYS,
    Attention,
    KeysAreValues,
    SharedQueriesAndKeys,
    assert_changed_as_told,
    batch,
    before_and,
    between,
    made,
    maxima,
    sharpened,
    touched,
    watched,
    with_qk_clip,
)

# The scores of these are no multiples of parameters, or not alone; each is left, with a word on why.
LEFT = {
    "layouts.WeightNormed": "is parametrised",
    "fused.FlexAlibi": "added", "positions.Alibi": "added", "products.BaddbmmAlibi": "added",
    "positions.Sinks": "sink", "positions.RelativeKeys": "more than one product",
    "positions.ContentAndPosition": "more than one product", "structures.TwoProducts": "more than one product",
    "norms_and_caps.UnitVectors": "no gain", "norms_and_caps.CosinePerHead": "no gain",
    "norms_and_caps.DifferentPerHead": "no gain", "structures.TalkingHeads": "mix several heads",
}  # fmt: skip
IN_LOOPS = ["structures.HeadLoop", "structures.HeadLoopOfSDPA", "structures.LayersInOneModule"]


@pytest.mark.filterwarnings("default")  # torch's own
@pytest.mark.parametrize("name", [name for name, entry in CORRECT.items() if entry.statistics == "all"])
def test_every_attention_of_the_zoo_meets_the_threshold_or_says_why_not(name):
    entry = CORRECT[name]
    model, inputs = entry.build()
    seen, before = watched(model, inputs), before_and(model)
    path = next(iter(entry.layers))
    threshold = between(seen.layers[path].stats.max)
    report = attnscale.clip_qk_(model, seen, threshold)
    assert_changed_as_told(before, model, touched(report))
    if name in LEFT:
        assert report.left
        assert all(LEFT[name] in left.reason for left in report.left)
        assert not report.heads
        return
    assert not [left for left in report.left if left.layer == seen.layers[path].name]
    now = watched(model, inputs).layers[path].stats.max
    clipped = [head for head in report.heads if head.layer == seen.layers[path].name]
    assert clipped
    rounding = 1 + entry.tolerance if entry.tolerance > 1e-3 else 1
    for head in clipped:
        assert float(now[head.head]) <= threshold * rounding
    over = [head for head in clipped if head.maximum > threshold]
    assert all(float(now[head.head]) > 0.95 * threshold for head in over), "clipped more than it had to be"


@pytest.mark.parametrize("name", [*(name for name in CORRECT if name.startswith("unbatched.")), *IN_LOOPS])
def test_qkclip_lowers_the_heads_over_the_threshold_and_no_others_without_a_batch_axis_and_in_loops(name):
    model, inputs = CORRECT[name].build()
    before, was = before_and(model), maxima(model, inputs)
    threshold = float(was.sort().values[len(was) // 2]) if name in IN_LOOPS else between(was)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotInsideWarning)
        reports = list(with_qk_clip(model, inputs, threshold, 4))
    found = maxima(model, inputs)
    if name == "structures.LayersInOneModule":  # later layers are given what earlier ones make
        assert float(found.max()) < threshold * 1.01
        return
    torch.testing.assert_close(found, was.clamp(max=threshold), rtol=1e-3, atol=1e-4)
    if name not in IN_LOOPS:
        assert_changed_as_told(before, model, touched(reports[0]))
        clipped = {head.head for report in reports if report is not None for head in report.heads}
        assert clipped == set((was > threshold).nonzero().flatten().tolist()) != set()


def test_one_head_over_and_another_negative_writes_no_nan():
    """NVIDIA/Megatron-LM issue 7517: the root of a negative ratio."""
    model = made(factor=1e4)
    with torch.no_grad():
        model.k_proj.bias[HEAD_DIM : 2 * HEAD_DIM] = -50.0
        model.q_proj.bias[HEAD_DIM : 2 * HEAD_DIM] = 50.0
    seen, before = watched(model, batch()), before_and(model)
    largest = seen.layers["Attention"].stats.max
    assert largest[0] > 100
    assert largest[1] < 0
    report = attnscale.clip_qk_(model, seen)
    assert [head.head for head in report.heads] == [0]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert_changed_as_told(before, model, touched(report))
    assert maxima(model, batch())[0] <= 100


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("way", WAYS)
def test_a_head_that_is_not_finite_is_left_and_named_and_never_written(way, value):
    model, before = made(), {}

    def explode(step):
        if step == 1:
            with torch.no_grad():
                model.q_proj.weight[0] = value
                model.q_proj.weight[2 * HEAD_DIM : 3 * HEAD_DIM] *= 50
            before.update(before_and(model))

    reports = list(WAYS[way](model, batch(), 10.0, 3, explode))
    assert [(left.layer, left.head) for left in reports[-1].left] == [("Attention", 0)]
    assert "nan" in reports[-1].left[0].reason or "inf" in reports[-1].left[0].reason
    assert [head.head for head in reports[-1].heads] == [2]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter[:HEAD_DIM], before[name][:HEAD_DIM], rtol=0, atol=0, equal_nan=True)
        assert parameter[HEAD_DIM:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_meet_the_threshold_too(dtype):
    model = made(factor=300.0).to(dtype)
    seen, before = watched(model, batch(dtype)), before_and(model)
    report = attnscale.clip_qk_(model, seen)
    assert [head.head for head in report.heads] == [0]
    assert_changed_as_told(before, model, touched(report))
    now = float(maxima(model, batch(dtype))[0])
    assert 100 * (1 - 4 * torch.finfo(dtype).eps) - 0.1 <= now <= 100 * (1 + torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("model", "sharp", "written", "heads", "power"),
    [
        (lambda: made(), "q_proj.weight", "qk", [0], 0.5),
        (lambda: made(kv_heads=1), "k_proj.weight", "q", [0, 1, 2, 3, 4], 1.0),  # a shared key is never clipped
        (lambda: made(SharedQueriesAndKeys), "q_proj.weight", "q", [0], 0.5),
        (lambda: made(KeysAreValues), "q_proj.weight", "q", [0], 1.0),
    ],
    ids=["queries and keys", "a shared key", "one projection of both", "keys are values"],
)
def test_each_factor_goes_where_it_changes_one_head_and_no_values(model, sharp, written, heads, power):
    model = sharpened(model(), sharp, slice(HEAD_DIM), 1e3)
    report = attnscale.clip_qk_(model, watched(model, batch()), 10.0)
    assert [head.head for head in report.heads] == heads
    for head in report.heads:
        rows = tuple(range(head.head * HEAD_DIM, (head.head + 1) * HEAD_DIM))
        assert {(each.parameter, each.rows) for each in head.touched} == {
            (f"{side}_proj.{kind}", rows) for side in written for kind in ("weight", "bias")
        }
        assert all(each.factor == pytest.approx(head.gamma**power) for each in head.touched)
    assert maxima(model, batch())[heads].tolist() == pytest.approx([10.0] * len(heads), rel=1e-3)


class Untied(nn.Module):
    """Two layers, which may share their projections."""

    def __init__(self, tied):
        super().__init__()
        self.first, self.second = Attention(D_MODEL, HEADS), Attention(D_MODEL, HEADS)
        if tied:
            self.second.q_proj, self.second.k_proj = self.first.q_proj, self.first.k_proj

    def forward(self, x):
        return self.second(self.first(x).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("tied", [False, True])
def test_layers_that_share_a_projection_are_clipped_once_by_the_higher(tied):
    torch.manual_seed(5)
    model = sharpened(Untied(tied), "first.q_proj.weight", slice(HEAD_DIM), 1e3)
    seen, before = watched(model, batch()), before_and(model)
    threshold = 0.5 * max(
        float(layer.stats.max[0]) for layer in seen.layers.values() if not tied or layer.stats.max[0] > 1
    )
    report = attnscale.clip_qk_(model, seen, threshold)
    assert_changed_as_told(before, model, touched(report))
    assert {head.layer for head in report.heads} == ({"first", "second"} if tied else {"first"})
    assert all(head.gamma == pytest.approx(0.5, rel=1e-4) for head in report.heads)


def test_sampled_maxima_are_named_so():
    model = made(factor=1e4)
    report = attnscale.clip_qk_(model, watched(model, batch(), rows=3))
    assert {head.measured for head in report.heads} == {"sampled"}
    assert all(head.maximum <= head.bound for head in report.heads)


def test_the_value_before_clipping_is_logged_and_reported(caplog):
    model = made(factor=1e4)
    seen = watched(model, batch())
    highest = float(seen.layers["Attention"].stats.max[0])
    with caplog.at_level(logging.INFO, "attnscale"):
        report = attnscale.clip_qk_(model, seen)
    assert attnscale.clip_qk_(made(), seen, 1e9) == attnscale.ClipReport(1e9, (), ())
    assert f"{highest:.4g}" in caplog.text
    assert report.heads[0].maximum == pytest.approx(highest)
    assert f"{highest:.4g}" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["heads"][0]["head"] == 0


@pytest.mark.parametrize("threshold", [0, -1.0, math.nan, math.inf, "100", True, None])
def test_a_threshold_that_no_score_can_be_held_to_is_refused(threshold):
    model = made()
    with pytest.raises(SettingError, match="threshold as a positive"):
        attnscale.clip_qk_(model, watched(model, batch()), threshold)
    with pytest.raises(SettingError, match="threshold as a positive"):
        attnscale.QKClip(model, threshold)
    with pytest.raises(InputError, match="a torch"):
        attnscale.QKClip([model])


@pytest.mark.parametrize("every", [1, 10])
def test_a_measurement_clips_once_however_often_it_is_given(every):
    """Called at each step with a monitor that samples each tenth: 100 → 4.9 → 0.24 → 0.012, it was."""
    model, inputs = made(factor=1000), batch()
    monitor = attnscale.Monitor(model, every=every, rows=None)
    reports = []
    for _ in range(7):
        model(*inputs).sum().backward()
        monitor.step()
        reports.append(attnscale.clip_qk_(model, monitor, threshold=7.0))
    monitor.close()
    assert [len(report.heads) > 0 for report in reports] == [True, *(6 * [False])]
    assert float(maxima(model, inputs).max()) == pytest.approx(7.0, rel=1e-3)
    assert [bool(report.left) for report in reports[1:]] == 6 * [every > 1]
    assert all("clipped after this measurement" in left.reason for report in reports for left in report.left)


def test_calls_after_a_clip_are_judged_without_those_before_it():
    model, inputs = made(factor=1000), batch()
    with torch.no_grad(), attnscale.watch(model, rows=None) as seen:
        model(*inputs)
        assert attnscale.clip_qk_(model, seen, threshold=7.0).heads
        model(*inputs)
        again = attnscale.clip_qk_(model, seen, threshold=7.0)
    assert not again.heads
    assert not again.left


def test_a_copy_of_the_model_is_clipped_by_the_same_measurement():
    model, inputs = made(factor=1000), batch()
    copied, seen = copy.deepcopy(model), watched(model, inputs)
    first, second = (attnscale.clip_qk_(each, seen, threshold=7.0) for each in (model, copied))
    assert [head.gamma for head in first.heads] == [head.gamma for head in second.heads] != []


def test_no_part_of_a_name_can_control_a_terminal(caplog):
    """Layers, parameters and reasons: in reports, and in what is logged."""
    evil = "l\x1b[31m\u202e\x9b"
    model = nn.ModuleDict({evil: nn.MultiheadAttention(16, 2, batch_first=True)})
    x = torch.randn(2, 6, 16)
    with torch.no_grad():
        model[evil].in_proj_weight.mul_(100)
    with attnscale.watch(model, rows=None) as seen:
        model[evil](x, x, x)
    with caplog.at_level("DEBUG", logger="attnscale"):
        reports = [attnscale.clip_qk_(model, seen, threshold=1.0) for _ in range(2)]
    assert reports[0].heads
    assert reports[1].left
    said = [*map(str, reports), *caplog.messages, str(SettingError(evil))]
    assert all(line.isprintable() for each in said for line in each.splitlines())


def test_thousands_of_heads_are_clipped_within_a_second():
    """6,400 heads took 70 s: every head was compared with every other, and with every row."""
    torch.manual_seed(0)
    layers, heads = 100, 64
    model = nn.ModuleList(nn.MultiheadAttention(2 * heads, heads, batch_first=True) for _ in range(layers))
    x = torch.randn(1, 3, 2 * heads)
    with torch.no_grad(), attnscale.watch(model, rows=None) as seen:
        for layer in model:
            layer(x, x, x)
    limit = min(float(layer.stats.max.min()) for layer in seen.layers.values()) / 2
    began = time.process_time()
    report = attnscale.clip_qk_(model, seen, threshold=abs(limit) / 1e3)
    taken = time.process_time() - began
    assert len(report.heads) > 0.9 * layers * heads
    assert taken < 5  # of the processor; 70 s before, and 0.33 in benchmarks/clip.py
