"""A recorded training run: its conclusion in one sentence, its table, and its report."""

import math
from dataclasses import replace

import pytest

from attnscale.show.report.run import run_report
from attnscale.show.run import conclusion
from attnscale.train import LayerRecord, Monitor, Record, summarise
from attnscale.train.run import survey
from tests.train.training import LENGTH, batch, loss_of, small_model

from .reports import records
from .test_report import figure, text

ONE = ("blocks.0.attention",)


STEPS = range(0, 320, 10)


def run_of(**layers):
    """Return records of layers, each a function from the step to the largest score, or to it and the clip factor."""
    records = []
    for step in STEPS:
        found = {}
        for name, largest in layers.items():
            value, factor = largest(step) if isinstance(largest(step), tuple) else (largest(step), None)
            numbers = {"max": [value], "max_above_mean": [value], "entropy_ratio": [0.5], "jacobian_trace": [0.5]}
            found[name] = LayerRecord(7, numbers, clipped=None if factor is None else [factor])
        records.append(Record(step, 0.0, found))
    return records


def still(step):
    return 5.0 + 0.1 * (step % 3)


CASES = {
    "0 alarms; no layer's largest score grows by more than its error.": dict(a=still, b=still),
    "0 alarms; the largest score of 1 of 2 layers grows, and none comes near a threshold.": dict(
        a=still, b=lambda step: 3.0 * math.exp(0.005 * step)
    ),
    "0 alarms; forecast: b is the first to pass 100, about step 314 and not before 313.": dict(
        a=still, b=lambda step: 0.2 * math.exp(0.02 * (step - 3))
    ),
    "0 alarms; the largest score, 355 in b, grows.": dict(a=still, b=lambda step: 200 + 0.5 * step),
    "0 alarms; the largest score, 246 in b, has stopped growing.": dict(
        a=still, b=lambda step: 300 * math.exp(0.01 * min(step, 250) - 0.045 * max(step - 250, 0))
    ),
    "0 alarms; QK-Clip limits the largest score of 1 of 2 layers.": dict(a=still, b=lambda step: (100.0, 0.9)),
    "0 alarms; the largest score of 1 of 2 layers is past 10,000 and growing.": dict(
        a=still, b=lambda step: 300 * math.exp(0.02 * step)
    ),
}


@pytest.mark.parametrize("sentence", CASES)
def test_the_conclusion_says_only_what_the_records_show(sentence):
    assert conclusion(summarise(run_of(**CASES[sentence]))) == sentence


def test_a_falling_score_is_not_called_growing():
    records = run_of(a=still, b=lambda step: 3.0 * math.exp(0.02 * min(step, 250) - 0.01 * max(step - 250, 0)))
    page = run_report("log", records)
    assert "in none of the 2 layers" in page.sections[0].blocks[0][0].views["largest score"].notice


def test_a_clipped_layer_is_marked_in_the_table():
    page = run_report("log", run_of(a=still, b=lambda step: (100.0, 0.9)))
    rows = [row.cells for _, group in page.sections[1].blocks[0].groups for row in group]
    assert ["limited by QK-Clip" in row for row in rows] == [False, True]


def test_the_report_shows_growth_with_a_forecast_and_its_interval():
    recorded = records()
    run = summarise(recorded, damaged=2)
    page, crossing = run_report("scores.jsonl", recorded, run), run.layers[1].crossing
    chart = figure(page, "run-curves").views["largest score"]
    assert next(iter(figure(page, "run-curves").views)) == "largest score"
    forecast = next(series for series in chart.series if "forecast" in series.name)
    assert forecast.x[-1] == 950 + 8 * 50  # eight samples ahead
    assert forecast.x[0] < crossing.earliest < crossing.step < forecast.x[-1]
    assert forecast.y[-1] > 1000
    assert forecast.low[-1] <= forecast.y[-1] <= forecast.high[-1]
    assert [series.name for series in chart.series[-2:]] == ["published limit 100", "published limit 1,000"]
    assert "grows in 1 of 2 layers; fastest in blocks.1.attention" in chart.notice
    assert "forecast: blocks.1.attention is the first to pass 1,000" in page.verdict
    assert page.notes[0].code == "exploding"
    assert "step 750" in page.notes[0].place
    assert "2 damaged lines" in text(page)


def test_of_many_layers_the_report_shows_the_growing_one_and_the_range_of_all():
    names = tuple(f"blocks.{index}.attention" for index in range(31))
    page = run_report("log", records(names, rate=0.003, alarm=False))
    series = [each.name for each in figure(page, "run-curves").views["largest score"].series]
    assert series[0] == "all 31 layers, lowest to highest"
    assert "layer 30" in series


def names(page):
    return {found.name for section in page.sections for found in section.figures}


def test_loss_and_learning_rate_are_shown_beside_the_spread():
    page = run_report("log", records())
    loss = figure(page, "loss-curves").views["loss"]
    assert (loss.series[0].x[-1], loss.series[0].y[-1]) == (950, pytest.approx(2.05))
    assert loss.notice == "The loss went from 3 at step 0 to 2.05 at step 950; lowest 2.05 at step 950."
    assert set(figure(page, "loss-curves").views) == {"loss", "learning rate"}
    spread = figure(page, "spread-curves").views["spread"]
    assert spread.series[-1].name == "critical spread √(2 ln n)"
    assert set(spread.series[-1].y) == {math.sqrt(2 * math.log(23))}


def test_a_loss_of_nan_is_reported():
    seen = records(ONE)
    seen[-1] = replace(seen[-1], loss=math.nan)
    assert "not a number" in figure(run_report("log", seen), "loss-curves").views["loss"].notice


@pytest.mark.parametrize("layers", [ONE, ("blocks.0.attention", "blocks.1.attention")])
def test_the_critical_spread_is_a_line_even_for_one_layer(layers):
    by_layer = figure(run_report("log", records(layers)), "critical-spread").views[""]
    measured, line = by_layer.series
    assert measured.x == list(range(len(layers)))
    assert len(line.x) == 2  # and not a point
    assert set(line.y) == {math.sqrt(2 * math.log(23))}
    assert f"0 of {2 * len(layers)} heads are above the critical spread" in by_layer.notice


def test_the_report_of_a_log_without_keys_and_losses_says_what_is_missing():
    old = [replace(record, loss=None, lr=None) for record in records()]
    for record in old:
        record.layers.update({name: replace(own, keys=None) for name, own in record.layers.items()})
    page = run_report("log", old)
    assert {"run-curves", "head-map"} == names(page)
    assert "lack the number of keys per row, so no critical spread is drawn" in text(page)
    assert "pass it as Monitor.step(loss=…, lr=…)" in text(page)


def test_a_monitor_records_the_number_of_visible_keys(tmp_path):
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
