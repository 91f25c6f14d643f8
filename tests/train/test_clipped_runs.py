"""A monitor beside a clip: what was taken is in the record, and what is held raises no alarm."""

import json
import math
from itertools import pairwise

import pytest
import torch

import attnscale
from attnscale import Monitor, QKClip
from attnscale.train import LayerRecord, Record, summarise

from .training import batch, loss_of, small_model

THRESHOLD, GROWTH, STEPS = 15.0, 1.06, 100


WAYS = {
    "eager": (None, lambda model: model),
    "compiled": (None, lambda model: torch.compile(model, backend="aot_eager")),
    "written out, compiled": (1e4, lambda model: torch.compile(model, backend="aot_eager")),
}


def run(clips, way="eager", steps=STEPS, every=5, until=math.inf):
    """A model whose queries grow at every step, clipped `until` a step: the records of a monitor, and all reports."""
    softcap, compiled = WAYS[way]
    model, records, reports = small_model(softcap=softcap), [], []
    called = compiled(model)
    clip = QKClip(model, THRESHOLD) if clips else None
    monitor = Monitor(model, every, None, [records.append])
    for step in range(steps):
        if step == until:
            clip.close()
            clip = None
        loss_of(called, batch(2)).backward()
        with torch.no_grad():
            for block in model.blocks:
                block.attention.query.weight.mul_(GROWTH)
        model.zero_grad()
        reports.append(None if clip is None else clip.step())
        monitor.step()
    monitor.close()
    if clip is not None:
        assert clip.is_inside
        clip.close()
    again = Monitor(model)
    again.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    growth = [monitor.growth(name) for name in records[0].layers]
    assert growth == [again.growth(name) for name in records[0].layers]
    again.close()
    return records, reports


def test_an_unclipped_run_is_forecast_to_pass_a_threshold():
    free, _ = run(clips=False)
    assert any("will pass" in alarm.message for record in free for alarm in record.alarms)
    assert all(layer.crossing is not None for layer in summarise(free).layers)
    assert {layer.clipped is None for record in free for layer in record.layers.values()} == {True}


def test_a_clip_that_no_longer_acts_holds_nothing():
    records, _ = run(clips=True, until=40)
    assert [alarm for record in records for alarm in record.alarms]
    assert all(layer.crossing is not None for layer in summarise(records).layers)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what its compiler imports
@pytest.mark.parametrize("way", WAYS)
def test_a_run_clipped_at_the_threshold_is_not_forecast_to_pass_one(way):
    held, reports = run(clips=True, way=way)
    assert any(reports)
    assert [alarm for record in held[1:] for alarm in record.alarms] == []  # the first has what the audit found
    first = max(
        next(number for number, record in enumerate(held) if record.layers[name].lowered < 1) for name in held[0].layers
    )
    for count in range(first + 1, len(held) + 1):
        assert [layer.crossing for layer in summarise(held[:count]).layers] == [None, None]
    assert [layer.growth.rate for layer in summarise(held).layers] == [pytest.approx(math.log(GROWTH), rel=0.2)] * 2


def test_a_record_multiplies_the_clip_factors_since_the_previous_record():
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


def test_a_log_keeps_the_clip_factors_of_layers_that_have_them():
    for clipped, lowered in (([0.5, 1.0], 0.5), (None, 1.0)):
        record = Record(0, 0.0, {"layer": LayerRecord(7, {"max": [3.0, 2.0]}, clipped=clipped)})
        layer = Record.from_line(record.to_line()).layers["layer"]
        assert (layer.clipped, layer.lowered) == (clipped, lowered)
        assert ("clipped" in json.loads(record.to_line())["layers"]["layer"]) is (clipped is not None)


def test_factors_of_clip_qk_are_recorded_too():
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
