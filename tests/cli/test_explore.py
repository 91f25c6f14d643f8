"""`attnscale explore`: write one file, where it was asked for, and open it once."""

import json
import webbrowser

import pytest

from .running import run


@pytest.fixture
def opened(monkeypatch):
    addresses = []
    monkeypatch.setattr(webbrowser, "open", lambda address: not addresses.append(address))
    return addresses


def test_explore_writes_the_page_and_opens_it_as_a_file(opened, tmp_path):
    out = tmp_path / "a new folder" / "ä #1.html"
    result = run("explore", "--out", out, "--json")
    assert json.loads(result.stdout) == {"page": str(out), "address": out.as_uri(), "opened": True}
    assert opened == [out.as_uri()]
    assert "%231.html" in opened[0]  # not taken for the start of a fragment
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_by_default_it_writes_to_the_working_folder_and_says_if_no_browser_opens(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    result = run("explore")
    assert result.returncode == 0
    assert result.stdout.startswith("The page is in attnscale-explore.html\nfile:///")
    assert "open the page yourself" in result.stderr
    assert (tmp_path / "attnscale-explore.html").stat().st_size < 3_000_000
    assert run("explore", "--no-open").stderr == ""


def test_a_view_is_part_of_the_address(opened, tmp_path):
    view = "d=64&rule=inverse_dim&scores=14, 10, 12&k=2.5"
    assert run("explore", "--out", tmp_path / "page.html", "--view", view).returncode == 0
    assert opened[0].endswith("#d=64&rule=inverse_dim&scores=14,%2010,%2012&k=2.5")


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
    result = run("explore", "--out", tmp_path / "page.html", "--view", view)
    assert (result.returncode, opened, list(tmp_path.iterdir())) == (2, [], [])
    assert result.stderr.startswith(f"attnscale: {sentence}")
    assert run("explore", "--out", tmp_path).returncode == 2  # a folder
