"""Forecasts and alarms on recorded training runs, healthy and diverging: what benchmarks/forecasts.py says of them."""

import runpy
from itertools import groupby
from pathlib import Path

import pytest

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "forecasts.py"))


@pytest.fixture(scope="module", params=["TUNED", "SET_ASIDE"])
def runs(request):
    return [BENCHMARK["replay"](run) for run in BENCHMARK["read_runs"](seeds=BENCHMARK[request.param])]


def test_the_runs_are_many_and_of_both_kinds(runs):
    found = BENCHMARK["figures"](runs)
    assert found["healthy runs"] >= 60
    assert found["diverging runs"] >= 12


def test_intervals_of_90_percent_hold_85_to_95_percent_of_what_the_run_then_shows(runs):
    """It was 67%."""
    assert 0.85 <= BENCHMARK["figures"](runs)["coverage of 90% intervals"] <= 0.95


def test_false_forecasts_are_few_in_healthy_runs(runs):
    """It was 39% of the samples."""
    assert BENCHMARK["figures"](runs)["false share"] < 0.02


def test_diverging_runs_are_told_of_before_their_loss_departs(runs):
    assert BENCHMARK["figures"](runs)["told before the loss departs"] >= 0.8


def test_no_alarm_at_the_first_step_and_none_twice_for_one_layer_and_step(runs):
    for run in runs:
        assert not [alarm for step, alarm in run.alarms if step == 0], run.case
        raised = [(step, alarm.layer, alarm.code) for step, alarm in run.alarms]
        assert len(set(raised)) == len(raised), run.case


def test_runs_at_rates_that_suit_them_raise_no_warning_of_scores(runs):
    for run in runs:
        is_calm = (
            run.is_healthy and max(layer.whole("max") for each in run.records for layer in each.layers.values()) < 100
        )
        warned = [alarm for _, alarm in run.alarms if alarm.code == "exploding" and alarm.severity != "note"]
        assert not (is_calm and warned), run.case


def test_every_case_has_as_many_runs(runs):
    cases = sorted(run.case for run in runs)
    assert {len(list(same)) for _, same in groupby(cases)} == {2}
