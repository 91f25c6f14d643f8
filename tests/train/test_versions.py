"""Logs carry the version of their format: a newer one is read for what is known of it."""

import json

import pytest

from attnscale.train import Record
from attnscale.train.line import line_of, parsed
from attnscale.train.record import VERSION
from attnscale.train.schema import LineError
from tests.train.corrupt import ALARM, LAYER, line


def newer(**changed):
    return line(version=VERSION + 1, **changed).encode()


def test_every_line_says_its_version():
    plain = json.loads(line_of(parsed(line().encode())))
    assert plain["version"] == VERSION
    assert parsed(line_of(Record.from_dict(plain))) == Record.from_dict(plain)


def test_a_newer_record_is_read_for_what_is_known():
    found = parsed(
        newer(
            weather="fine",
            layers={"a.0": LAYER | {"colour": "red"}, "a.1": {"shape": "round"}},
            alarms=[ALARM | {"since": 40}, ALARM | {"severity": "catastrophe"}],
        )
    )
    assert found.layers == parsed(line().encode()).layers
    assert [alarm.to_dict() for alarm in found.alarms] == [ALARM]


def test_of_a_newer_record_steps_and_layers_must_be_known():
    for broken in (newer(step="seven"), newer(layers={"a.0": {"shape": "round"}})):
        with pytest.raises(LineError):
            parsed(broken)


@pytest.mark.parametrize("version", [None, VERSION])
def test_a_record_of_this_version_has_no_field_too_many(version):
    with pytest.raises(LineError, match="since"):
        parsed(line(version=version, alarms=[ALARM | {"since": 40}]).encode())


def test_a_version_that_is_none_is_damage():
    with pytest.raises(LineError, match="version"):
        parsed(line(version="two").encode())
