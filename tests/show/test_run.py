"""What is concluded from a run, in one sentence, and that a forecast is told as one."""

import math

import pytest

from attnscale.show.report.run import run_report
from attnscale.show.run import conclusion
from attnscale.train import LayerRecord, Record, summarise

STEPS = range(0, 320, 10)


def run_of(**layers):
    """Records of layers, each a function from the step to the largest score, or to it and what a clip did."""
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
def test_the_conclusion_says_what_the_samples_bear(sentence):
    assert conclusion(summarise(run_of(**CASES[sentence]))) == sentence


def test_a_layer_that_falls_is_said_to_grow_nowhere():
    records = run_of(a=still, b=lambda step: 3.0 * math.exp(0.02 * min(step, 250) - 0.01 * max(step - 250, 0)))
    page = run_report("log", records)
    assert "In none of the 2 layers" in page.sections[0].blocks[0][0].views["largest score"].notice


def test_what_a_clip_holds_is_said_to_be_held():
    page = run_report("log", run_of(a=still, b=lambda step: (100.0, 0.9)))
    rows = [row.cells for _, group in page.sections[1].blocks[0].groups for row in group]
    assert ["limited by QK-Clip" in row for row in rows] == [False, True]
