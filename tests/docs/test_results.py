"""The page of the lab's results, made from whatever records there are."""

import json
import xml.etree.ElementTree as ET

import pytest

from attnscale.lab.experiments import EXPERIMENTS
from attnscale.lab.result import Check, Curve, Heatmap, Plot, Result, Table
from docs.tools.record import draw
from docs.tools.results import FOLDER, NONE_YET, with_results

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture
def folder(tmp_path):
    x = (16.0, 64.0, 256.0)
    result = Result(
        "variance",
        "Does the spread grow as √d_k?",
        "It grows with exponent 0.501.",
        (Check("Var = d_k", True, "64.2 at 64"), Check("Var = 1", False, HOSTILE)),
        (Table("Spread by width", ("d_k", "spread"), ((16, 4.00123), (64, None))),),
        (
            Plot(
                "Spread", "d_k", "spread",
                (Curve("measured", x, (4.0, None, 16.0), (3.9, 7.9, 15.0), (4.1, 8.1, 17.0)),
                 Curve("√d_k", x, (4.0, 8.0, 16.0), is_theory=True)),
                "the lines meet", log_x=True, log_y=True,
            ),
            Heatmap("Gain", "keys", "spread", (8, 64), (1.0, 8.0), ((0.9, 0.99), (None, 0.4)), "dark is frozen"),
        ),
        {"seconds": 3.2, "versions": {"torch": "2.13"}},
    )  # fmt: skip
    (tmp_path / "variance.json").write_text(json.dumps(result.to_dict()), encoding="utf-8")
    (tmp_path / "other.json").write_text('{"not": "a result"}', encoding="utf-8")
    return tmp_path


def test_an_empty_folder_says_so(tmp_path):
    assert with_results("# Results", tmp_path) == f"# Results\n\n{NONE_YET}"


def test_a_result_shows_question_conclusion_checks_tables_and_settings(folder):
    page = with_results("# Results", folder)
    assert NONE_YET not in page
    for shown in ("## variance", "Does the spread grow as √d\\_k?", "exponent 0.501", "| 16 | 4.001 |", "| 64 | – |"):
        assert shown in page
    assert page.count(">holds<") == page.count(">does not hold<") == 1
    assert "1 of 2 checks hold" in page
    assert "seconds: 3.2" in page


def test_what_a_record_says_is_text_and_never_markup(folder):
    assert "<img" not in with_results("# Results", folder)


def test_charts_are_drawn_with_bands_gaps_theory_and_cells(folder):
    page = with_results("# Results", folder)
    plot, heatmap = (ET.fromstring(line) for line in page.splitlines() if line.startswith("<svg"))
    assert len(plot.findall("polygon")) == 1
    assert [line.get("stroke-dasharray") for line in plot.findall("polyline")] == ["3 3"]
    assert len(plot.findall("circle")) == 2  # the two sides of the gap
    labels = [text.text for text in plot.findall("text")]
    assert {"measured", "√d_k (theory)", "d_k", "spread"} <= set(labels)
    assert len(heatmap.findall("rect")) == 4
    assert "dark is frozen" in heatmap.get("aria-label")


def test_every_experiment_is_recorded_with_its_command_and_seconds():
    recorded = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json")}
    assert set(recorded) == set(EXPERIMENTS)
    for name, result in recorded.items():
        assert not result["settings"]["quick"]
        assert result["settings"]["command"].startswith(f"attnscale lab {name}")
        assert result["settings"]["seconds"] > 0


def test_the_plots_are_those_of_the_records():
    drawn = {path.name: path.read_text(encoding="utf-8") for path in (FOLDER / "plots").glob("*.svg")}
    assert drawn == draw()
    for svg in drawn.values():
        assert ET.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"


def test_the_page_begins_with_every_question_and_its_answer_in_short(folder):
    page = with_results("# Results", folder)
    row = "| [variance](#variance) | Does the spread grow as √d\\_k? | It grows with exponent 0.501. |"
    assert page.index(row) < page.index("## variance")


def test_the_minutes_that_the_lab_lists_are_the_recorded_ones():
    for name, experiment in EXPERIMENTS.items():
        recorded = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["settings"]["cell_seconds"]
        assert experiment.core_minutes == pytest.approx(recorded / 60, rel=0.05)
