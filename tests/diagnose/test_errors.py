"""Sampled numbers stand beside their standard errors, and decide nothing that is within them."""

import math

import pytest
import torch

import attnscale
from attnscale.diagnose.alarm import LayerSnapshot, Thresholds, layer_alarm
from attnscale.diagnose.scores import score_findings
from attnscale.diagnose.verdict import head_verdicts, layer_verdict
from attnscale.measure.statistics import STATISTICS, Place, in_place
from attnscale.plain import plain
from attnscale.theory.limits import CRITICAL_MARGIN, critical_spread
from attnscale.watching import watch

from .layers import layer_of


def sampled(query, key, rows):
    """A layer of which only some rows were looked at."""
    layer = layer_of(query, key)
    object.__setattr__(layer, "stats", attnscale.score_stats(query, key, rows=rows))
    return layer


def at_the_edge(length=211, d=16):
    """Scores whose spread is that from which a head is saturated."""
    edge = CRITICAL_MARGIN * critical_spread(length)
    return math.sqrt(edge) * torch.randn(2, 3, length, d), math.sqrt(edge) * torch.randn(2, 3, length, d)


def test_a_head_within_its_error_of_a_limit_is_uncertain():
    layer = sampled(*at_the_edge(), rows=8)
    assert {head.verdict for head in head_verdicts(layer)} == {"uncertain"}
    assert layer_verdict(layer).verdict == "uncertain"
    assert [finding.code for finding in score_findings(layer, trained=False)] == []
    exact = layer_of(*at_the_edge())
    assert "uncertain" not in {head.verdict for head in head_verdicts(exact)}


@pytest.mark.parametrize(("times", "verdict"), [(0.1, "diluted"), (1.0, "healthy"), (30.0, "sharp")])
def test_a_head_far_from_every_limit_is_judged_by_a_sample_too(times, verdict):
    query, key = times * torch.randn(2, 3, 211, 16), torch.randn(2, 3, 211, 16)
    assert {head.verdict for head in head_verdicts(sampled(query, key, rows=32))} == {verdict}


def test_errors_stand_beside_sampled_numbers_alone():
    model = attnscale.MultiheadAttention(24, 2, batch_first=True)
    x = torch.randn(2, 400, 24)
    for rows in (200, None):
        with torch.no_grad(), watch(model, rows=rows) as seen:
            model(x, x, x)
        (layer,) = seen.layers.values()
        line = str(seen).splitlines()[1]
        told = layer.stats.to_dict()
        assert ("stderr" in told) == ("±" in line) == (rows is not None)
        if rows is None:
            continue
        for entry in in_place(Place.SEEN):
            assert told["stderr"][entry.attribute] == plain(layer.stats.stderr(entry.attribute).tolist())
            assert entry.error(layer.stats) == pytest.approx(layer.stats.stderr(entry.attribute).mean().item())
            value, error = entry.factor * entry.whole(layer.stats), entry.factor * entry.error(layer.stats)
            assert f"{value:.3g}±{error:.1g}" in line
    assert math.isnan(STATISTICS["max"].error(layer.stats))


def test_an_error_that_rows_cannot_tell_is_a_question_mark_and_no_verdict():
    model, x = attnscale.MultiheadAttention(24, 2, batch_first=True), torch.randn(2, 53, 24)
    with torch.no_grad(), watch(model, rows=8) as seen:
        model(x, x, x)
    (layer,) = seen.layers.values()
    assert layer.stats.stderr("std_within_rows").isnan().all()
    assert "±?" in str(seen)
    assert {head.verdict for head in head_verdicts(layer)} == {"uncertain"}


@pytest.mark.parametrize(("error", "raised"), [(0.0, True), (0.001, True), (0.02, False)])
def test_an_alarm_within_its_error_of_a_floor_is_not_raised(error, raised):
    snapshot = LayerSnapshot("layer", 1.0, 0, 0.5, 0.04, 0, error={"jacobian_trace": error}.__getitem__)
    assert (layer_alarm(snapshot, Thresholds(), {})[0] is not None) == raised
