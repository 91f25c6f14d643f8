"""`attnscale explore`: a file, where it was asked for, opened once."""

import json
import webbrowser

import pytest
from typer.testing import CliRunner

from attnscale.cli import app
from attnscale.errors import SettingError


@pytest.fixture
def opened(monkeypatch):
    addresses = []
    monkeypatch.setattr(webbrowser, "open", lambda address: not addresses.append(address))
    return addresses


def run(*arguments):
    return CliRunner().invoke(app, ["explore", *map(str, arguments)])


def test_it_writes_the_page_and_opens_it_as_a_file(opened, tmp_path):
    out = tmp_path / "a new folder" / "ä #1.html"
    result = run("--out", out)
    assert result.exit_code == 0
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert opened == [out.as_uri()]
    assert "%231.html" in opened[0]  # not taken for the start of a fragment
    assert str(out) in result.output


def test_it_writes_beside_where_one_is_by_default(opened, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("--no-open").exit_code == 0
    assert opened == []
    assert (tmp_path / "attnscale-explore.html").stat().st_size < 3_000_000


def test_json_says_where_the_page_is(opened, tmp_path):
    out = tmp_path / "page.html"
    assert json.loads(run("--out", out, "--json").output) == {"page": str(out), "address": out.as_uri(), "opened": True}


def test_where_no_browser_opens_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    result = run("--out", tmp_path / "page.html")
    assert result.exit_code == 0
    assert "open the page yourself" in result.stderr


@pytest.mark.parametrize(
    ("view", "sentence"),
    [
        ("d=abc", "Expected a number from 1 to 1,024 for d in --view, got 'abc'."),
        ("scores=1&n=nan", "Expected a number from 2 to 1,048,576 for n in --view, got 'nan'."),
        ("q=11", "Expected a number from 0.1 to 10.0 for q in --view, got '11'."),
        ("seed=", "Expected a number from 1 to 9,999 for seed in --view, got ''."),
        ("rule=none", "Unknown rule 'none' in --view. Expected one of: inverse_dim, "),
        ("depth=3", "Unknown setting 'depth' in --view. Expected one of: d, n, "),
    ],
)
def test_a_view_that_the_page_cannot_show_is_refused(opened, tmp_path, view, sentence):
    error = run("--out", tmp_path / "page.html", "--view", view).exception
    assert isinstance(error, SettingError)
    assert str(error).startswith(sentence)
    assert not (tmp_path / "page.html").exists()
    assert opened == []


def test_a_view_is_part_of_the_address(opened, tmp_path):
    view = "d=64&rule=inverse_dim&scores=14, 10, 12&k=2.5"
    assert run("--out", tmp_path / "page.html", "--view", view).exit_code == 0
    assert opened[0].endswith("#d=64&rule=inverse_dim&scores=14,%2010,%2012&k=2.5")


def test_a_folder_is_refused_before_anything_is_written(opened, tmp_path):
    assert isinstance(run("--out", tmp_path).exception, SettingError)
    assert opened == []
