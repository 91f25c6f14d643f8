"""A monitor beside a clip: what was taken is in the record, and what is held raises no alarm."""

import math
from itertools import pairwise

import pytest
import torch

import attnscale
from attnscale import Monitor, QKClip
from attnscale.train import summarise

from .training import batch, loss_of, small_model

THRESHOLD, GROWTH, STEPS = 15.0, 1.06, 100


def run(clips, steps=STEPS, every=5):
    """A model whose queries grow at every step: the records of a monitor, and all reports."""
    model, records, reports = small_model(), [], []
    clip = QKClip(model, THRESHOLD) if clips else None
    monitor = Monitor(model, every, None, [records.append])
    for _ in range(steps):
        loss_of(model, batch(2)).backward()
        with torch.no_grad():
            for block in model.blocks:
                block.attention.query.weight.mul_(GROWTH)
        model.zero_grad()
        reports.append(None if clip is None else clip.step())
        monitor.step()
    monitor.close()
    if clip is not None:
        clip.close()
    return records, reports


def test_a_run_that_is_held_at_the_threshold_is_not_told_to_pass_one():
    free, _ = run(clips=False)
    assert any("will pass" in alarm.message for record in free for alarm in record.alarms)
    assert all(layer.crossing is not None for layer in summarise(free).layers)
    held, reports = run(clips=True)
    assert any(reports)
    assert [alarm for record in held for alarm in record.alarms] == []
    first = max(
        next(number for number, record in enumerate(held) if record.layers[name].lowered < 1) for name in held[0].layers
    )
    for count in range(first + 1, len(held) + 1):
        assert [layer.crossing for layer in summarise(held[:count]).layers] == [None, None]
    assert [layer.growth.rate for layer in summarise(held).layers] == [pytest.approx(math.log(GROWTH), rel=0.2)] * 2


def test_the_record_has_what_was_taken_since_the_one_before():
    records, reports = run(clips=True, steps=40, every=4)
    assert len(records) == 10
    assert all(layer.clipped == [1.0] * 3 for layer in records[0].layers.values())
    for before, record in pairwise(records):
        for name, layer in record.layers.items():
            wanted = [1.0] * 3
            for report in filter(None, reports[before.step : record.step]):
                for head in report.heads:
                    wanted[head.head] *= head.gamma if head.layer == name else 1.0
            assert layer.clipped == pytest.approx(wanted), (record.step, name)
    assert min(layer.lowered for record in records for layer in record.layers.values()) < 1


def test_where_nobody_clips_nothing_is_told():
    records, _ = run(clips=False, steps=3, every=1)
    assert [layer.clipped for record in records for layer in record.layers.values()] == [None] * 6


def test_what_clip_qk_took_is_told_too():
    model, records = small_model(), []
    monitor = Monitor(model, 2, None, [records.append])
    for step in range(4):
        loss_of(model, batch(2, seed=step)).backward()
        monitor.step()
        if step == 0:
            report = attnscale.clip_qk_(model, monitor, 0.5)
    monitor.close()
    assert report.heads
    layer = report.heads[0].layer
    assert records[0].layers[layer].clipped is None
    factors = {head.head: head.gamma for head in report.heads if head.layer == layer}
    assert records[1].layers[layer].clipped == pytest.approx([factors.get(head, 1.0) for head in range(3)])


def test_a_model_inside_the_one_that_is_watched_is_known_by_its_own_names():
    model = small_model()
    outer = torch.nn.Sequential(model)
    clip, records = QKClip(model, 0.5), []
    monitor = Monitor(outer, 1, None, [records.append])
    for step in range(3):
        loss_of(outer, batch(2, seed=step)).backward()
        clip.step()
        monitor.step()
    monitor.close()
    clip.close()
    assert min(layer.lowered for layer in records[1].layers.values()) < 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what its compiler imports
@pytest.mark.parametrize("attention", ["fused", "written out"])
def test_forecasts_of_a_compiled_model_that_is_clipped_inside_are_no_false_alarms(attention):
    model, records = small_model(softcap=None if attention == "fused" else 1e4), []
    run = torch.compile(model, backend="aot_eager")
    clip = QKClip(model, THRESHOLD)
    monitor = Monitor(model, 5, None, [records.append])
    for _ in range(70):
        loss_of(run, batch(2)).backward()
        with torch.no_grad():
            for block in model.blocks:
                block.attention.query.weight.mul_(GROWTH)
        model.zero_grad()
        clip.step()
        monitor.step()
    assert clip.is_inside
    monitor.close()
    clip.close()
    assert min(layer.lowered for layer in records[-1].layers.values()) < 1
    forecasts = [alarm for record in records[1:] for alarm in record.alarms]  # the first has what the audit found
    assert forecasts == []
    found = summarise(records).layers
    assert [layer.crossing for layer in found] == [None, None]
    assert [layer.growth.rate for layer in found] == [pytest.approx(math.log(GROWTH), rel=0.2)] * 2
