"""The report of a log: learning curves, where the heads are, and the critical spread."""

import math
from dataclasses import replace

import pytest

from attnscale.show.report.run import run_report
from attnscale.train import Monitor
from attnscale.train.run import survey
from tests.train.training import LENGTH, batch, loss_of, small_model

from .reports import records
from .test_report import figure, text

ONE = ("blocks.0.attention",)


def names(page):
    return {found.name for section in page.sections for found in section.figures}


def test_loss_and_learning_rate_stand_beside_the_spread_and_its_critical_spread():
    page = run_report("log", records())
    loss = figure(page, "loss-curves").views["loss"]
    assert (loss.series[0].x[-1], loss.series[0].y[-1]) == (950, pytest.approx(2.05))
    assert loss.notice == "The loss went from 3 at step 0 to 2.05 at step 950; lowest 2.05 at step 950."
    assert set(figure(page, "loss-curves").views) == {"loss", "learning rate"}
    spread = figure(page, "spread-curves").views["spread"]
    assert spread.series[-1].name == "critical spread √(2 ln n)"
    assert set(spread.series[-1].y) == {math.sqrt(2 * math.log(23))}


def test_a_loss_that_was_not_a_number_is_told():
    seen = records(ONE)
    seen[-1] = replace(seen[-1], loss=math.nan)
    assert "not a number" in figure(run_report("log", seen), "loss-curves").views["loss"].notice


@pytest.mark.parametrize("layers", [ONE, ("blocks.0.attention", "blocks.1.attention")])
def test_every_layer_has_its_line_of_the_critical_spread_also_the_only_one(layers):
    by_layer = figure(run_report("log", records(layers)), "critical-spread").views[""]
    measured, line = by_layer.series
    assert measured.x == list(range(len(layers)))
    assert len(line.x) == 2  # and not a point
    assert set(line.y) == {math.sqrt(2 * math.log(23))}
    assert f"0 of {2 * len(layers)} heads are above the critical spread" in by_layer.notice


def test_logs_from_before_they_had_keys_and_losses_say_what_is_missing():
    old = [replace(record, loss=None, lr=None) for record in records()]
    for record in old:
        record.layers.update({name: replace(own, keys=None) for name, own in record.layers.items()})
    page = run_report("log", old)
    assert {"run-curves", "head-map"} == names(page)
    assert "lack the number of keys per row, so no critical spread is drawn" in text(page)
    assert "pass it as Monitor.step(loss=…, lr=…)" in text(page)


def test_a_monitor_writes_the_keys_that_rows_see_and_curves_keep_the_first_heads(tmp_path):
    model = small_model()
    monitor = Monitor(model, every=1, rows=None, sinks=[tmp_path / "scores.jsonl"])
    for _ in range(3):
        loss_of(model, batch()).backward()
        monitor.step()
    monitor.close()
    curves = survey(tmp_path / "scores.jsonl").curves()
    layers = [layer for record in curves for layer in record.layers.values()]
    assert [layer.keys for layer in layers] == [(LENGTH + 1) / 2] * 6  # of causal rows
    assert [len(layer.numbers["spread"]) for layer in layers] == [3, 3, 1, 1, 3, 3]
