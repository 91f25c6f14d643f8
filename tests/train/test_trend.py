"""Growth of the largest score: one rule, for a monitor that remembers and for a log that is read."""

import math

import pytest

from attnscale.diagnose.alarm import Thresholds
from attnscale.diagnose.forecast import Trend
from attnscale.train import LayerRecord, Record, summarise
from attnscale.train.history import WINDOW, History, Sample, append, trend


def latest(samples):
    found = []
    for sample in samples:
        append(found, sample)
    return found


def layer(largest, softcap=None):
    numbers = {"max": [largest, 0.5], "max_bound": [2 * largest, 1.0]}
    return LayerRecord(7, numbers, softcap=softcap)


def growing(steps, rate=0.01):
    return [(step, 5.0 * math.exp(rate * step)) for step in steps]


RUNS = {
    "a few samples": growing(range(0, 70, 10)),
    "more than the window": [*growing(range(0, 100, 10), rate=-0.02), *growing(range(100, 100 + 10 * WINDOW, 10))],
    "a resumed run that repeats steps": [*growing(range(0, 200, 10)), *growing(range(100, 300, 10), rate=0.03)],
    "scores that are not numbers": [
        (step, math.nan if step % 30 == 0 else value) for step, value in growing(range(0, 200, 10))
    ],
}


@pytest.mark.parametrize("name", RUNS)
def test_a_monitor_and_its_log_tell_the_same_growth(name):
    history = History(Thresholds())
    for step, largest in RUNS[name]:
        history.add(step, {"layer": layer(largest)})
    (run,) = summarise([Record(step, 0.0, {"layer": layer(largest)}) for step, largest in RUNS[name]]).layers
    assert run.growth == history.growth("layer") is not None


def test_what_softmax_feels_is_told_by_the_first_of_the_heads_that_have_a_score():
    numbers = {"max": [math.nan, 3.0, 5.0, 5.0, 7.0], "max_above_mean": [1.0, 9.0, 4.0, math.nan, 5.0]}
    assert LayerRecord(7, numbers).effective_max == (5.0, 3)
    largest, head = LayerRecord(7, {"max": [float("nan"), math.nan]}).effective_max
    assert math.isnan(largest)
    assert head == 0


def test_growth_is_that_of_the_latest_samples_alone():
    samples = [Sample(step, value, 2 * value) for step, value in RUNS["more than the window"]]
    assert len(latest(samples)) == WINDOW
    assert trend(latest(samples), None).growth.rate == pytest.approx(0.01)


def test_steps_that_a_resumed_run_repeats_are_taken_from_it():
    samples = [Sample(step, value, 2 * value) for step, value in RUNS["a resumed run that repeats steps"]]
    kept = latest(samples)
    assert [sample.step for sample in kept] == list(range(0, 300, 10))
    assert kept[10] == samples[20]


def test_a_log_forecasts_what_the_monitor_would_warn_of_unless_a_soft_cap_stops_it():
    samples = growing(range(0, 290, 10), rate=0.018)  # from 5 to 770
    expected = Trend(*zip(*samples, strict=True), ()).passes(1000.0)
    assert expected is not None
    for softcap, crossing in ((None, expected), (1500.0, expected), (900.0, None)):
        records = [Record(step, 0.0, {"layer": layer(largest, softcap)}) for step, largest in samples]
        assert summarise(records).layers[0].crossing == crossing
        alarms = []
        history = History(Thresholds())
        for step, largest in samples:
            alarms += history.add(step, {"layer": layer(largest, softcap)})
        told = [alarm.message for alarm in alarms if "will pass 1,000" in alarm.message]
        assert bool(told) == (crossing is not None)
        assert all("; if this goes on, it will pass 1,000 about step" in message for message in told)


def test_layers_raise_together_the_alarms_that_each_raises_alone():
    runs = {
        "grows": dict(growing(range(0, 290, 10), rate=0.018)),
        "grows faster": dict(growing(range(0, 290, 10), rate=0.025)),
        "seen later": dict(growing(range(50, 290, 10), rate=0.019)),
        "is no number at first": {0: math.nan} | dict(growing(range(10, 290, 10), rate=0.018)),
        "stays": dict.fromkeys(range(0, 290, 10), 7.0),
    }
    together, alone, expected = History(Thresholds()), {name: History(Thresholds()) for name in runs}, 0
    for step in range(0, 290, 10):
        seen = {name: layer(run[step]) for name, run in runs.items() if step in run}
        apart = [alarm for name in seen for alarm in alone[name].add(step, {name: seen[name]})]
        assert together.add(step, seen) == apart
        expected += len(apart)
    assert expected > len(runs)
