"""Standard errors stand beside sampled numbers alone, in JSON and in the table."""

import math

import pytest
import torch

import attnscale
from attnscale.diagnose import LayerSnapshot, Thresholds, head_verdicts, layer_alarm
from attnscale.measure.statistics import STATISTICS, Place, in_place
from attnscale.plain import plain
from attnscale.watching import watch


def watched(length, rows):
    model, x = attnscale.MultiheadAttention(24, 2, batch_first=True), torch.randn(2, length, 24)
    with torch.no_grad(), watch(model, rows=rows) as seen:
        model(x, x, x)
    (layer,) = seen.layers.values()
    return layer, str(seen)


def test_errors_stand_beside_sampled_numbers_alone():
    layer, table = watched(400, rows=None)
    assert "stderr" not in layer.stats.to_dict()
    assert "±" not in table
    layer, table = watched(400, rows=200)
    told = layer.stats.to_dict()
    for entry in in_place(Place.SEEN):
        assert told["stderr"][entry.attribute] == plain(layer.stats.stderr(entry.attribute).tolist())
        assert entry.error(layer.stats) == pytest.approx(layer.stats.stderr(entry.attribute).mean().item())
        value, error = entry.factor * entry.whole(layer.stats), entry.factor * entry.error(layer.stats)
        assert f"{value:.3g}±{error:.1g}" in table
    assert math.isnan(STATISTICS["max"].error(layer.stats))


def test_an_error_that_rows_cannot_tell_is_a_question_mark_and_no_verdict():
    layer, table = watched(53, rows=8)
    assert layer.stats.stderr("std_within_rows").isnan().all()
    assert "±?" in table
    assert {head.verdict for head in head_verdicts(layer)} == {"uncertain"}


@pytest.mark.parametrize(("error", "raised"), [(0.0, True), (0.001, True), (0.02, False)])
def test_an_alarm_within_its_error_of_a_floor_is_not_raised(error, raised):
    snapshot = LayerSnapshot("layer", 1.0, 0, 0.5, 0.04, 0, error={"jacobian_trace": error}.__getitem__)
    assert (layer_alarm(snapshot, Thresholds(), {})[0] is not None) == raised
