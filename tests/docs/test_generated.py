"""Generated parts of the documentation are committed, so that GitHub shows whole pages, and are not stale."""

import json
import math
import runpy
import xml.etree.ElementTree as ET

import pytest

from attnscale.cli import app
from attnscale.diagnose import CODES
from attnscale.lab.experiments import EXPERIMENTS
from attnscale.rules.listing import catalogue
from docs.tools.generate import PART, PARTS
from tests.docs.blocks import PAGES, ROOT, same

RESULTS = ROOT / "docs/results"
RECORDS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")}
digest = runpy.run_path(str(ROOT / "scripts/record_results.py"))["digest"]


def test_no_generated_part_is_stale(known_claims):
    written = {part["name"]: part[0] for page in PAGES for part in PART.finditer(page.read_text(encoding="utf-8"))}
    assert set(written) == set(PARTS)
    for name, part in written.items():
        current = f"{name} --> {PARTS[name]()}"
        # the numbers of some claims are of models trained on this machine; their verdicts are tested in tests/claims
        assert same(part, current, math.inf if name == "ledger" else 0.02), f"{name}: `make generated` writes it anew."


def test_every_rule_code_and_command_has_a_section_of_its_own():
    rules, findings, commands = (
        (ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("rules", "findings", "command-line")
    )
    for rule in catalogue():
        assert len(rules.split(f"\n## {rule.name}\n")[1].split("\n## ")[0].split()) >= 15, rule.name
    for code in CODES:
        section = findings.split(f"\n## {code}\n")[1].split("\n## ")[0]
        assert "**Cause.**" in section, code
        assert "**Fix.**" in section, code
        example = section.split("```text")[1]
        assert any(f"\n{severity} {code}: " in example for severity in ("note", "warning", "error")), code
    names = [command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands]
    assert [name for name in names if f"\n## `attnscale {name}`\n" not in commands] == []


def test_every_experiment_is_recorded_with_its_command_and_its_time():
    assert set(RECORDS) == set(EXPERIMENTS)
    for name, result in RECORDS.items():
        settings = result["settings"]
        assert not settings["quick"]
        assert settings["command"].startswith(f"attnscale lab {name}")
        assert EXPERIMENTS[name].core_minutes == pytest.approx(settings["cell_seconds"] / 60, rel=0.05)


def test_every_plot_is_drawn_from_the_recorded_numbers():
    plots = {
        f"{name}-{number}.svg": plot
        for name, result in RECORDS.items()
        for number, plot in enumerate(result["plots"], 1)
    }
    drawn = {path.name: path.read_text(encoding="utf-8") for path in (RESULTS / "plots").glob("*.svg")}
    assert set(drawn) == set(plots), "`python scripts/record_results.py` draws them."
    for name, svg in drawn.items():
        assert ET.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
        assert digest(plots[name]) in svg, f"{name} is stale: `python scripts/record_results.py` draws it."


def test_the_picture_shows_what_the_command_prints(tmp_path, capsys):
    runpy.run_path(str(ROOT / "docs/pictures/make.py"))["main"](tmp_path)
    capsys.readouterr()
    assert (tmp_path / "predict.svg").read_bytes() == (ROOT / "docs/pictures/predict.svg").read_bytes()


def test_the_picture_of_each_verdict_shows_a_head_of_that_verdict():
    drawn = runpy.run_path(str(ROOT / "docs/pictures/verdicts.py"))
    page = (ROOT / "docs/guides/healthy.md").read_text(encoding="utf-8")
    for name in drawn["CASES"]:
        assert drawn["measured"](name)[0].verdict == name
        assert f"\n## {name}\n" in page
        assert f"(../pictures/verdicts/{name}.png)" in page
        assert (ROOT / f"docs/pictures/verdicts/{name}.png").is_file()


def test_the_costs_on_the_page_of_speed_are_the_recorded_ones():
    table = runpy.run_path(str(ROOT / "benchmarks/table.py"))["table"]()
    assert table in (ROOT / "docs/speed.md").read_text(encoding="utf-8")
