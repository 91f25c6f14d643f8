"""QK-Clip in a log: what it took off is known, so that growth is the optimiser's and what it holds is left in peace."""

import json
import math

import pytest

from attnscale.diagnose.alarm import Thresholds
from attnscale.train import LayerRecord, Record, summarise
from attnscale.train.history import History, Sample, is_held, trend

RATE, THRESHOLD = 0.01, 100.0


def clipped_run(steps=range(0, 600, 10), threshold=THRESHOLD, until=math.inf):
    """A layer that grows by exp(RATE) a step, clipped to a threshold after every record that passed it."""
    largest, factor = 20.0, 1.0
    for step in steps:
        yield step, LayerRecord(7, {"max": [largest, 0.5], "max_bound": [2 * largest, 1.0]}, clipped=[factor, 1.0])
        factor = min(1.0, threshold / largest) if step < until else 1.0
        largest *= factor * math.exp(RATE * 10)


def records(**changed):
    return [Record(step, 0.0, {"layer": layer}) for step, layer in clipped_run(**changed)]


def test_the_field_is_kept_by_a_log_and_optional():
    record = records()[20]
    assert record.layers["layer"].clipped == [pytest.approx(0.93, abs=0.1), 1.0]
    assert Record.from_dict(record.to_dict()).layers["layer"].lowered == pytest.approx(
        record.layers["layer"].lowered, rel=1e-4
    )
    plain = Record(0, 0.0, {"layer": LayerRecord(7, {"max": [3.0]})})
    assert "clipped" not in json.loads(plain.to_json())["layers"]["layer"]
    assert Record.from_dict(plain.to_dict()).layers["layer"].clipped is None
    assert plain.layers["layer"].lowered == 1.0


def test_growth_is_what_the_optimiser_did():
    (layer,) = summarise(records()).layers
    assert layer.last_max < 1.2 * THRESHOLD
    assert layer.growth.rate == pytest.approx(RATE, rel=1e-6)
    assert math.exp(layer.growth.level) == pytest.approx(layer.last_max)


def test_a_layer_that_a_clip_holds_is_not_forecast_to_pass_and_raises_no_alarm():
    history, alarms = History(Thresholds()), []
    for count, record in enumerate(records(), 1):
        alarms += history.add(record.step, dict(record.layers))
        (layer,) = summarise(records()[:count]).layers
        if record.step > 170:  # clipped for the first time
            assert layer.crossing is None
    assert [alarm for alarm in alarms if alarm.severity != "note"] == []


def test_a_clip_that_no_longer_acts_holds_nothing_once_scores_pass_it():
    samples = [Sample.of(step, layer) for step, layer in clipped_run(until=300)]
    held = [is_held(samples[:count]) for count in range(1, len(samples) + 1)]
    assert not any(held[:17])  # not clipped yet
    assert all(held[18:30])
    assert not any(held[33:])
    assert trend(samples[-32:], None).is_clipped is False


def test_a_layer_that_was_never_clipped_is_fitted_as_before():
    free = [Sample.of(step, layer) for step, layer in clipped_run(threshold=math.inf)]
    untold = [Sample(sample.step, sample.largest, sample.bound) for sample in free]
    assert trend(free, None) == trend(untold, None)


def test_what_is_remembered_of_clips_goes_through_a_checkpoint():
    history, again = History(Thresholds()), History(Thresholds())
    for record in records():
        history.add(record.step, dict(record.layers))
    again.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert again.growth("layer") == history.growth("layer") is not None
    assert again.growth("layer").rate == pytest.approx(RATE)
