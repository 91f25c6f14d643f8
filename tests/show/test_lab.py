import io
import os
from contextlib import redirect_stdout
from unittest import mock

import pytest

from attnscale.lab.experiment import Check, Result, Table
from attnscale.lab.experiments import EXPERIMENTS
from attnscale.show.lab import show_experiments, show_result
from attnscale.show.text import shown

CHECKS = (Check("one is one", True, "measured 1"), Check("two is three", False, "measured 2"))
TABLE = Table(
    "Widths",
    ("a scheme", "d_model", "predicted", "measured", "±", "scale for one", "calibrated", "H / ln n"),
    (("orthogonal", 64, 1.0, 1.00123456, 0.0123456, 0.25, None, 0.5), ("[red]no[/red]", 8, 1e7, 1e-7, 0.0, True, 2, 3)),
)


def printed(show, *arguments, width=80):
    with mock.patch.dict(os.environ, COLUMNS=str(width)), redirect_stdout(io.StringIO()) as screen:
        show(*arguments)
    return screen.getvalue()


def test_a_result_fits_eighty_columns_and_breaks_no_word():
    text = printed(show_result, Result("name", "Is it?", "It is. " * 40, CHECKS, (TABLE,), ()))
    assert max(map(len, text.splitlines())) <= 80
    for word in ("orthogonal", "calibrated", "predicted", "1.001", "0.012", "1e+07", "–", "yes"):
        assert word in text


def test_text_from_a_result_is_not_read_as_markup():
    assert "[red]no[/red]" in printed(show_result, Result("name", "Is it?", "", CHECKS, (TABLE,), ()))


def test_a_check_that_fails_says_how_and_one_that_holds_is_a_line():
    text = printed(show_result, Result("name", "Is it?", "", CHECKS, (), ()))
    assert "pass one is one" in text
    assert "measured 1" not in text
    assert "fail two is three: measured 2" in text


def test_the_list_names_every_experiment_with_its_question():
    text = " ".join(printed(show_experiments, EXPERIMENTS.values(), width=200).split())
    for experiment in EXPERIMENTS.values():
        assert f"{experiment.name} {experiment.question} {len(experiment.cells()):,}" in text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (-1234567.0, "-1.235e+06"), (float("nan"), "–"), (-0.5, "-0.5")]
)
def test_numbers(value, text):
    assert shown(value) == text


def test_columns_without_room_are_named():
    text = printed(show_result, Result("name", "Is it?", "", (), (TABLE,), ()), width=50)
    assert max(map(len, text.splitlines())) <= 50
    assert "In a wider terminal, and with --json:" in " ".join(text.split())
    assert "calibrated, H / ln n." in " ".join(text.split())
    assert "In a wider terminal" not in printed(show_result, Result("name", "Is it?", "", (), (TABLE,), ()), width=90)
