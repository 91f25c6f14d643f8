"""Lines that a log may hold and no monitor wrote: each is damaged, whatever looks at it."""

import json

LAYER = {"rows": 7, "max": [3.0, 0.5], "entropy_ratio": [0.5, 0.9], "spread": [1.0, None], "total_spread": [1.0, None]}
ALARM = {
    "layer": "a.0", "head": 1, "code": "exploding", "severity": "note", "message": "It grows.", "measured": 101.0,
    "expected": 100.0, "advice": "Clip it.",
}  # fmt: skip


def line(step=50, **changed):
    """A sound line, or one with some of its fields changed; None takes one out."""
    plain = {"step": step, "time": 1e9, "ranks": 1, "layers": {"a.0": LAYER}, "alarms": []} | changed
    return json.dumps({name: value for name, value in plain.items() if value is not None})


def with_layer(**changed):
    return line(layers={"a.0": LAYER | changed})


def with_alarm(**changed):
    plain = ALARM | changed
    return line(alarms=[{name: value for name, value in plain.items() if value != "out"}])


CORRUPT = {
    "no JSON": "hello",
    "half a line": line()[:40],
    "bytes of nothing": "\x00" * 200,
    "a list": "[]",
    "a number": "7",
    "nothing": "null",
    "a text": '"record"',
    "no fields": "{}",
    "deep lists": "[" * 100_000 + "]" * 100_000,
    "deep layers": line().replace('"alarms": []', '"alarms": ' + "[" * 900 + "]" * 900),
    "a step of 1e400": line().replace('"step": 50', '"step": 1e400'),
    "a step that is NaN": line().replace('"step": 50', '"step": NaN'),
    "a step that is half": line(step=0.5),
    "a step that is a text": line(step="50"),
    "a step that is true": line(step=True),
    "a step below zero": line(step=-1),
    "a step of 20 digits": line(step=10**20),
    "a step of 10,000 digits": line().replace('"step": 50', '"step": ' + "9" * 10_000),
    "no step": line(step=None),
    "a time that is infinite": line().replace("1000000000.0", "Infinity"),
    "a time beyond every calendar": line(time=1e300),
    "no time": line(time=None),
    "no layers": line(layers=None),
    "layers in a list": line(layers=[LAYER]),
    "a layer that is a number": line(layers={"a.0": 7}),
    "rows that are infinite": line().replace('"rows": 7', '"rows": Infinity'),
    "rows below zero": with_layer(rows=-7),
    "no rows": line(layers={"a.0": {"max": [1.0]}}),
    "numbers that are one": with_layer(max=3.0),
    "numbers that are a text": with_layer(max="3.0"),
    "a number that is a text": with_layer(max=["3.0", 0.5]),
    "a number that is true": with_layer(max=[True, 0.5]),
    "a number of 1e400": with_layer(max=[7.25, 0.5]).replace("7.25", "1e400"),
    "a number of 400 digits": with_layer(max=[7.25, 0.5]).replace("7.25", "9" * 400),
    "fewer heads than others": with_layer(max=[3.0]),
    "no heads": with_layer(max=[], entropy_ratio=[], spread=[]),
    "broken that is a text": with_layer(broken="x"),
    "a soft-cap that is a list": with_layer(softcap=[50.0]),
    "alarms that are a number": line(alarms=7),
    "an alarm that is a text": line(alarms=["exploding"]),
    "an unknown severity": with_alarm(severity="catastrophe"),
    "an alarm without a message": with_alarm(message="out"),
    "an alarm of a layer that is a number": with_alarm(layer=7),
    "an alarm of a head that is a text": with_alarm(head="1"),
    "an alarm that measured a text": with_alarm(measured="101"),
    "ranks that are none": line(ranks=0),
    "a rank that is a text": line(rank="3"),
    "a run that is a number": line(run=7),
    "a run without end": line(run="x" * 1000),
}
ODD = {  # which are sound all the same
    "no spread": json.dumps(json.loads(line(layers={"a.0": {"rows": 7, "max": [3.0, 0.5]}}))),
    "no numbers": line(layers={"a.0": {"rows": 7}}),
    "no layers seen": line(layers={}),
    "unknown fields": line(colour="red"),
    "an alarm with an unknown field": with_alarm(colour="red"),
    "huge numbers": with_layer(max=[1e300, 1e300], entropy_ratio=[1e300, -1e300]),
    "an unknown code": with_alarm(code="\x1b[31mred"),
    "names that steer a terminal": line(layers={"a\x1b[31m\x9b\u202e.0": LAYER}),
    "half of a character": line(layers={"a\ud800.0": LAYER}),
    "the largest step": line(step=2**53),
}
