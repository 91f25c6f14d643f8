"""What is printed at 60 columns: whole words, whole numbers, names broken at their dots."""

import pytest
import torch
from torch import nn

import attnscale
from attnscale.checking import Checked
from attnscale.comparing import compare_profiles
from attnscale.comparing.sides import profile_of
from attnscale.show.check import show_check, show_comparison
from attnscale.show.listings import show_costs
from attnscale.show.text import at_dots
from tests.checking.broken import D_MODEL, Attention

WIDTH = 60
PARTS = ("a_tower_of_many_blocks", "that_has_a_long_name", "and_a_longer_one", "in_which_it_attends")


@pytest.fixture
def printed(monkeypatch, capsys):
    """What a function prints, line by line."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))

    def lines(function, *arguments):
        function(*arguments)
        found = capsys.readouterr().out.splitlines()
        assert max(map(len, found)) <= WIDTH
        assert "…" not in "".join(found)
        return found

    return lines


def deep(divisor):
    """An attention under a name longer than a line."""
    torch.manual_seed(0)
    model = Attention(divisor)
    for part in reversed(PARTS):
        around = nn.Sequential()
        around.add_module(part, model)
        model = around
    return model


def checked(divisor, layer=None):
    audit = attnscale.audit(deep(divisor), torch.randn(2, 11, D_MODEL))
    return Checked("deep", "noise", "cpu", None, (), audit, layer)


def test_verdicts_and_numbers_of_a_check_are_whole(printed):
    found = printed(show_check, checked(1.0))
    row = next(line for line in found if line.startswith("·"))
    assert row.endswith(" unscaled")
    heading = " ".join(found)
    assert "expected" in heading
    left_out = "In a wider terminal, and with --json: saturated rows, 1−Σp², weight on the first key."
    assert left_out in " ".join(" ".join(found).split())


def test_names_of_a_what_if_are_whole(printed):
    result = checked(1.0, ".".join(PARTS))
    found = printed(show_check, result)
    for row in result.what_if.rows:
        assert any(line.split()[:1] == [row.name] for line in found)


def test_long_names_are_broken_at_dots(printed):
    lines = printed(show_check, checked(1.0))
    ends = [line for line in lines if any(part in line for part in PARTS)]
    assert ends
    for part in PARTS:
        assert any(part in line for line in ends), part  # none is cut
    sides = [profile_of(deep(4.0), "deep", (torch.randn(3, 11, D_MODEL),), {}, None)]
    sides.append(profile_of(deep(1.0), "deep", (torch.randn(3, 11, D_MODEL),), {}, None))
    text = "\n".join(printed(show_comparison, compare_profiles(*sides, 0.01)))
    assert all(part in text for part in PARTS)


def test_times_of_a_bench_are_whole(printed):
    case = dict(batch=1, heads=2, kv_heads=2, q_len=256, kv_len=256, head_dim=64, dtype="float32", is_causal=False)
    timing = dict(milliseconds=1234.5, ratio=22.142, quartiles=(21.068, 28.744))
    cost = dict(case=case | {"backward": True}, variant="eager with statistics", graph=None, calls=timing)
    found = printed(show_costs, [cost | {"peak_bytes": None, "host_microseconds": None}])
    assert any(line.endswith("22.142  21.068–28.744") for line in map(str.rstrip, found))
    assert "peak" not in " ".join(found)


def test_what_has_no_dot_is_broken_somewhere():
    assert at_dots("x" * 25, 10).split("\n") == ["x" * 10, "x" * 10, "x" * 5]
    assert at_dots("short words stay", 10) == "short words stay"
