"""Reports as data: their sentences and figures agree with the numbers they are made from."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from attnscale.checking import Checked
from attnscale.diagnose import audit, diagnose
from attnscale.diagnose.what_if import COLUMNS
from attnscale.lab.experiment import Curve
from attnscale.models import CausalTransformer
from attnscale.show.page import Page
from attnscale.show.report.check import check_report
from attnscale.show.report.heads import (
    concentrated_heads,
    head_map,
    mapped,
    record_of,
    score_histograms,
    spreads_of,
)
from attnscale.show.report.lab import lab_report
from attnscale.show.report.run import twins_report
from tests.diagnose.layers import layer_of, random_layer

from .reports import EVIL, checked, layers_of, result, twins


def figure(page: Page, name):
    return next(figure for section in page.sections for figure in section.figures if figure.name == name)


def text(page: Page):
    blocks = (block for section in page.sections for block in section.blocks if isinstance(block, str))
    return " ".join([page.verdict, *(note.message for note in page.notes), *blocks])


def test_a_check_has_every_part():
    page = check_report(checked())
    assert [section.name for section in page.sections] == [
        "layers", "heads", "scores", "critical-spread", "what-if", "method",
    ]  # fmt: skip
    assert list(figure(page, "head-map").views) == [statistic.long for statistic in mapped()]
    what_if = next(section for section in page.sections if section.name == "what-if").blocks[1]
    assert [column.heading for column in what_if.columns[1:]] == [heading.replace("\n", " ") for heading in COLUMNS]
    assert what_if.groups[0][1][0].current


def test_findings_come_first_and_a_healthy_model_has_none():
    page = check_report(checked(scale=1.0))
    assert page.notes[0].code == "unscaled"
    assert page.tone == "error"
    assert (check_report(checked()).tone, check_report(checked()).notes) == ("fine", ())


def test_the_map_shows_the_statistics_of_every_head_and_their_median():
    found = checked(("a", "b"))
    page = check_report(found)
    spreads = [value for layer in found.audit.layers.values() for value in layer.stats.std_within_rows.tolist()]
    assert f"median over heads is {statistics.median(spreads):.3g}." in figure(page, "head-map").views["spread"].notice
    for statistic in mapped():
        view = figure(page, "head-map").views[statistic.long]
        for row, layer in zip(view.values, found.audit.layers.values(), strict=True):
            assert row == pytest.approx((statistic.factor * statistic.of(layer.stats)).tolist())
        assert view.errors is view.bounds is None  # every row was measured


def test_sampled_rows_show_their_errors():
    found = checked(rows=31, length=97)
    page = check_report(found)
    stats = found.audit.layers["blocks.1.attention"].stats
    spread, largest = (figure(page, "head-map").views[name] for name in ("spread", "largest score"))
    errors = stats.stderr("std_within_rows").tolist()  # NaN where the rows cannot tell it
    assert spread.errors[1] == pytest.approx([None if math.isnan(error) else error for error in errors])
    assert largest.bounds[1] == pytest.approx(stats.max_bound.tolist())
    assert "31 sampled rows" in text(page)
    assert "no number has a sampling error" in text(check_report(checked()))


def test_a_head_far_above_the_others_switches_the_colours_to_a_logarithm():
    layers = layers_of(["a", "b", "c"]) | layers_of(["d"], scale=99.0)
    page = check_report(Checked("t", "f", "cpu", None, (), diagnose(layers, trained=False)))
    views = figure(page, "head-map").views
    assert views["spread"].log
    assert not views["entropy (% of max)"].log
    assert views["spread"].low == min(min(row) for row in views["spread"].values)


def test_missing_heads_and_heads_that_are_nan_are_left_blank():
    query, key = torch.randn(1, 2, 7, 5), torch.randn(1, 2, 7, 5)
    key[0, 1, 3] = math.nan
    layers = {"a": layer_of(query, key), **layers_of(["b"])}
    view = head_map("map", {name: record_of(layer) for name, layer in layers.items()}).views["spread"]
    assert view.values[0][1:] == [None, None]
    assert None not in view.values[1]


def test_a_histogram_shows_the_widest_head_beside_both_densities():
    torch.manual_seed(0)
    layer = random_layer(heads=2, head_dim=64, length=307, scale=3 / 8)
    (view,) = score_histograms("scores", {"a": layer}).views.values()
    histogram, density = view.series[:2]
    measured, normal = np.array(histogram.y), np.interp(histogram.x, density.x, density.y)
    assert measured.sum() * (histogram.x[1] - histogram.x[0]) == pytest.approx(1)
    # normal scores: the histogram is the density, within the noise of its bins
    assert np.abs(measured - normal).max() < 0.15 * normal.max()
    assert "spread 3" in view.notice
    assert "would be 1" in view.notice or "would be 0.99" in view.notice  # 1/√d_k of unit-variance components


def test_the_critical_spread_counts_the_visible_keys():
    layers = layers_of(["a", "b"], scale=3.0)
    page = check_report(checked(("a", "b"), scale=3.0))
    (spread,) = spreads_of({"a": record_of(layers["a"])})
    assert spread.keys == 12  # of 23 causal rows, on average
    by_layer = figure(page, "critical-spreads").views[""]
    assert by_layer.series[1].y == pytest.approx([math.sqrt(2 * math.log(12))] * 2)
    assert "6 of 6 heads are above the critical spread" in by_layer.notice
    assert "furthest above it" in by_layer.notice


def test_an_experiment_shows_failed_checks_first_and_all_plots_and_tables():
    page = lab_report(result())
    assert page.verdict == "It grows as d_k, within 0.4%."
    assert page.tone == "warning"
    assert [note.tag for note in page.notes] == ["fail", "pass"]
    assert [section.title for section in page.sections] == [
        "Variance",
        "Side by side",
        "By width",
        "How it was measured",
    ]
    assert figure(page, "plot-0").views["Variance"].x.log
    table = page.sections[2].blocks[0]
    assert [row.cells for row in table.groups[0][1]] == [("1", "normal", "1.012"), ("64", EVIL, "–")]
    assert page.sections[-1].blocks == ({"seeds": "3", "torch": "2.13"},)


def test_the_first_sentence_of_a_conclusion_is_the_verdict_and_predictions_have_the_colour_of_their_curve():
    given = result()
    names = ("4 keys", "16 keys", "4 keys, expected", "16 keys, expected", "1/n")
    curves = tuple(Curve(name, (1.0,), (1.0,), is_theory=index > 1) for index, name in enumerate(names))
    plots = (replace(given.plots[0], curves=curves),)
    page = lab_report(replace(given, conclusion="It is 0.99 at d_k. All 2 checks hold.", plots=plots))
    assert (page.verdict, page.lead) == ("It is 0.99 at d_k.", ("All 2 checks hold.",))
    assert [series.tone for series in figure(page, "plot-0").views["Variance"].series] == [0, 1, 0, 1, "ink"]


def test_two_runs_share_a_chart_of_losses_and_have_a_table_each():
    given = twins()
    page = twins_report(given)
    assert page.lead == given.explanation
    assert [series.name for series in figure(page, "losses").views["loss"].series] == ["scaled", "unscaled"]
    assert "scaled: the loss went from 3 at step 0" in figure(page, "losses").views["loss"].notice
    tables = next(section for section in page.sections if section.name == "layers").blocks
    assert [table.caption for table in tables] == ["scaled", "unscaled"]
    assert [isinstance(block, dict) for block in page.sections[-1].blocks] == [True, True]


def test_two_runs_show_how_queries_share_the_gradient():
    given = twins()
    curves = [
        replace(run, received=((0.0, 0.0), (0.5, share), (1.0, 1.0)))
        for run, share in zip(given.runs, (0.4, 0.1), strict=True)
    ]
    chart = figure(twins_report(replace(given, runs=tuple(curves))), "shares").views[""]
    assert [(series.name, series.y[1]) for series in chart.series[:2]] == [("scaled", 0.4), ("unscaled", 0.1)]
    assert chart.series[2].y == (0.0, 1.0)  # all alike
    assert "received" not in [section.name for section in twins_report(given).sections]


def test_concentrated_heads_are_shown_with_their_weights_and_pattern():
    model = CausalTransformer(17, d_model=32, layers=1, heads=2).eval()
    with torch.no_grad():
        model.blocks[0].attention.query.weight *= 60
    layers = audit(model, torch.randint(17, (1, 150))).layers
    figure = concentrated_heads("sharp", layers)
    ((name, layer),) = layers.items()
    assert set(figure.views) <= {f"{name}, head {head}" for head in range(2)}
    for view_name, view in figure.views.items():
        weights = layer.weights(int(view_name[-1]))
        assert len(view.values) == len(view.values[0]) == len(view.rows) == len(view.columns) == 50
        assert max(map(max, view.values)) == pytest.approx(float(weights.max()))
        assert view.rows[-1] == "147–149"
        assert "weight" in view.notice or "content" in view.notice
    assert concentrated_heads("sharp", audit(CausalTransformer(17, 32, 1, 2), torch.zeros(1, 9).long()).layers) is None
