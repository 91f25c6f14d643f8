"""Results in a narrow terminal: whole words and numbers, names broken at dots, no markup, no control characters."""

import json
import logging
import re

import pytest
import torch
from rich.console import Console
from torch import nn

import attnscale
from attnscale.checking import Checked
from attnscale.cli.output import print_json, print_message
from attnscale.comparing import compare_profiles
from attnscale.comparing.sides import profile_of
from attnscale.diagnose import Finding
from attnscale.lab.experiment import Check, Result, Table
from attnscale.lab.experiments import EXPERIMENTS
from attnscale.plain import json_text, printable
from attnscale.show.check import show_check, show_comparison
from attnscale.show.lab import show_experiments, show_result
from attnscale.show.listings import show_costs
from attnscale.show.live_table import LiveTable
from attnscale.show.report import run_page
from attnscale.show.tables import table_of
from attnscale.show.terminal import print_table
from attnscale.show.text import at_dots
from attnscale.train import LayerRecord, Record
from tests.checking.broken import D_MODEL, Attention

PARTS = ("a_tower_of_many_blocks", "that_has_a_long_name", "and_a_longer_one", "in_which_it_attends")
CHECKS = (Check("one is one", True, "measured 1"), Check("two is three", False, "measured 2"))
TABLE = Table(
    "Widths",
    ("a scheme", "d_model", "predicted", "measured", "±", "scale for one", "calibrated", "H / ln n"),
    (("orthogonal", 64, 1.0, 1.00123456, 0.0123456, 0.25, None, 0.5), ("[red]no[/red]", 8, 1e7, 1e-7, 0.0, True, 2, 3)),
)
RESULT = Result("name", "Is it?", "It is. " * 40, CHECKS, (TABLE,), ())
CONTROL = "".join(map(chr, [*range(32), *range(0x7F, 0xA0), 0x200E, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]))
EVIL = f"a{CONTROL}\u2028\ud800b"


@pytest.fixture
def printed(monkeypatch, capsys):
    """Return the lines that a function prints in a terminal of some width; none is longer."""

    def lines(function, *arguments, width=60):
        monkeypatch.setenv("COLUMNS", str(width))
        function(*arguments)
        found = capsys.readouterr().out.splitlines()
        assert max(map(len, found)) <= width
        assert "…" not in "".join(found)
        return found

    return lines


def joined(lines):
    return " ".join(" ".join(lines).split())


def deep(divisor):
    """Return an attention module with a name longer than a line."""
    torch.manual_seed(0)
    model = Attention(divisor)
    for part in reversed(PARTS):
        around = nn.Sequential()
        around.add_module(part, model)
        model = around
    return model


def test_a_check_at_60_columns_has_whole_verdicts_and_names_the_columns_without_room(printed):
    audit = attnscale.audit(deep(1.0), torch.randn(2, 11, D_MODEL))
    result = Checked("deep", "noise", "cpu", None, (), audit, ".".join(PARTS))
    found = printed(show_check, result)
    assert next(line for line in found if line.startswith("·")).endswith(" unscaled")
    assert "Left out for lack of width: saturated rows, 1−Σp², weight on the first key." in joined(found)
    assert all(part in joined(found) for part in PARTS)
    for row in result.what_if.rows:
        assert any(line.split()[:1] == [row.name] for line in found)


def test_long_names_in_a_comparison_are_broken_at_dots(printed):
    x = torch.randn(3, 11, D_MODEL)
    sides = [profile_of(deep(divisor), "deep", (x,), {}, None) for divisor in (4.0, 1.0)]
    text = "\n".join(printed(show_comparison, compare_profiles(*sides, 0.01)))
    assert all(part in text for part in PARTS)
    assert at_dots("x" * 25, 10).split("\n") == ["x" * 10, "x" * 10, "x" * 5]
    assert at_dots("short words stay", 10) == "short words stay"


def test_timings_are_whole(printed):
    case = dict(batch=1, heads=2, kv_heads=2, q_len=256, kv_len=256, head_dim=64, dtype="float32", is_causal=False)
    timing = dict(milliseconds=1234.5, ratio=22.142, quartiles=(21.068, 28.744))
    cost = dict(case=case | {"backward": True}, variant="eager with statistics", graph=None, calls=timing)
    found = printed(show_costs, [cost | {"peak_bytes": None, "host_microseconds": None}])
    assert any(line.endswith("22.142  21.068–28.744") for line in map(str.rstrip, found))
    assert "peak" not in joined(found)


def test_a_result_of_the_lab_is_printed_whole_without_markup_and_with_the_evidence_of_failed_checks(printed):
    found = printed(show_result, RESULT, width=90)
    for text in ("orthogonal", "calibrated", "predicted", "1.001", "0.012", "1e+07", "–", "yes", "[red]no[/red]"):
        assert text in joined(found)
    assert "pass one is one" in found
    assert "fail two is three: measured 2" in found
    assert "Left out" not in joined(found)
    narrow = joined(printed(show_result, RESULT, width=50))
    assert "calibrated, H / ln n. A wider terminal or --json shows them." in narrow


def test_no_cell_loses_characters_where_headings_are_long(printed):
    headings = ("d_k", "median row's scores", "median query", "±", "lower half's share", "with √d_k")
    table = table_of(headings, [("512", "0.01323", "0.2973", "0.098", "0.0005%", "29.3%")], (0, 4, 5))
    for width in (60, 66, 80):
        assert "0.0005%29.3%" in "".join(printed(print_table, table, Console(width=width), width=width)).replace(
            " ", ""
        )


def test_the_list_of_experiments_has_every_question(printed):
    text = joined(printed(show_experiments, EXPERIMENTS.values(), width=200))
    for experiment in EXPERIMENTS.values():
        assert f"{experiment.name} {experiment.question} {len(experiment.cells()):,}" in text


def is_plain(text):
    return text.replace("\n", "").isprintable()


def test_control_characters_are_escaped_and_stay_distinct():
    assert len({printable(each) for each in EVIL}) == len(set(EVIL))
    for each in EVIL:
        assert printable(each).isprintable()
        assert (printable(each) == each) == each.isprintable()
        assert json.loads(json_text(each)) == each
        assert is_plain(json_text(each))


def test_nothing_printed_contains_control_characters(capsys, caplog):
    model, name, x = nn.Sequential(), EVIL.replace(".", ""), torch.randn(1, 3, 8)
    model.add_module(name, nn.MultiheadAttention(8, 2, batch_first=True))
    with attnscale.watch(model) as seen:
        model.get_submodule(name)(x, x, x)
    assert is_plain(str(seen))
    assert len(str(seen).splitlines()) == 2
    alarm = Finding(EVIL, 0, EVIL, "note", EVIL, None, None, EVIL)
    record = Record(0, 0.0, {EVIL: LayerRecord(7, {"max": [1.0]})}, [alarm])
    logging.getLogger("attnscale").warning("step %d: %s", 3, alarm)
    table = LiveTable()
    table(record)
    table.close()
    print_message(EVIL)
    print_json({EVIL: [EVIL]})
    written = capsys.readouterr()
    assert is_plain(caplog.text)
    assert is_plain(written.out)
    assert is_plain(written.err)
    assert is_plain(re.sub("<script.*?</script>", "", run_page(EVIL, [record]), flags=re.DOTALL))
