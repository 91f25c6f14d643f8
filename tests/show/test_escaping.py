"""Nothing printed carries what would steer a terminal, whatever names a model or a log brings."""

import json
import logging
import re

import pytest
import torch
from torch import nn

import attnscale
from attnscale.cli.output import print_json, print_message
from attnscale.diagnose import Finding
from attnscale.plain import json_text, printable
from attnscale.show.live_table import LiveTable
from attnscale.show.report import run_page
from attnscale.train import LayerRecord, Record

STEERING = "".join(
    map(chr, [*range(32), *range(0x7F, 0xA0), 0x200E, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028])
)
EVIL = f"a{STEERING}\ud800b"


def is_plain(text):
    return text.replace("\n", "").isprintable()


@pytest.mark.parametrize("one", EVIL)
def test_every_character_that_steers_is_escaped_and_no_two_look_alike(one):
    assert printable(one).isprintable()
    assert (printable(one) == one) == one.isprintable()
    assert json.loads(json_text(one)) == one
    assert is_plain(json_text(one))


def test_print_of_what_was_seen_is_plain():
    model = nn.Sequential()
    name = EVIL.replace(".", "")
    model.add_module(name, nn.MultiheadAttention(8, 2, batch_first=True))
    x = torch.randn(1, 3, 8)
    with attnscale.watch(model) as seen:
        model.get_submodule(name)(x, x, x)
    assert is_plain(str(seen))
    assert len(str(seen).splitlines()) == 2


def test_an_alarm_is_plain_in_logging_and_in_the_table(capsys, caplog):
    alarm = Finding(EVIL, 0, EVIL, "note", EVIL, None, None, EVIL)
    logging.getLogger("attnscale").warning("step %d: %s", 3, alarm)
    assert is_plain(caplog.text)
    table = LiveTable()
    table(Record(0, 0.0, {EVIL: LayerRecord(7, {"max": [1.0]})}, [alarm]))
    table.close()
    assert is_plain(capsys.readouterr().out)


def test_sentences_and_json_are_plain(capsys):
    print_message(EVIL)
    print_json({EVIL: [EVIL]})
    printed = capsys.readouterr()
    assert is_plain(printed.err)
    assert is_plain(printed.out)
    assert json.loads(printed.out) == {EVIL: [EVIL]}


def test_a_page_shows_names_without_what_turns_the_direction_of_text():
    alarm = Finding(EVIL, 0, EVIL, "note", EVIL, None, None, EVIL)
    page = run_page(EVIL, [Record(0, 0.0, {EVIL: LayerRecord(7, {"max": [1.0]})}, [alarm])])
    shown = re.sub("<script.*?</script>", "", page, flags=re.DOTALL)
    assert is_plain(shown)
