"""Logs for tests: records, lines, and processes that write."""

import itertools
import json

from attnscale.train import JsonLines, LayerRecord, Record

LAYER = {"rows": 7, "max": [3.0, 0.5], "entropy_ratio": [0.5, 0.9], "spread": [1.0, None], "total_spread": [1.0, None]}
ALARM = {
    "layer": "a.0", "head": 1, "code": "exploding", "severity": "note", "message": "It grows.", "measured": 101.0,
    "expected": 100.0, "advice": "Clip it.",
}  # fmt: skip


def record(step, largest=1.0, **more):
    numbers = {"max": [largest, 0.5], "entropy_ratio": [1 / (1 + largest), 0.9], "spread": [1.0, float("nan")]}
    numbers["total_spread"] = [2.0, float("nan")]
    return Record(step, 1e9 + step, {"layer": LayerRecord(7, numbers)}, **{"run": "one", **more})


def line(step=50, **changed):
    """A sound line, or one with some of its fields changed; None takes one out."""
    plain = {"step": step, "time": 1e9, "ranks": 1, "layers": {"a.0": LAYER}, "alarms": []} | changed
    return json.dumps({name: value for name, value in plain.items() if value is not None})


def write_forever(path, first, limit, said):
    """Write records and say so, until killed."""
    sink = JsonLines(path, limit)
    for step in itertools.count(first):
        sink(record(step))
        said.send(step)


def write_many(path, run, count, limit):
    sink = JsonLines(path, limit)
    for step in range(count):
        sink(record(step, run=run))
