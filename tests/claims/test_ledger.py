"""The ledger: all claims, their recorded verdicts, the command that shows them, and a command for each exercise."""

import dataclasses
import json
import math
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import attnscale.claims
from attnscale.claims import INDEX, SOURCES, Claim, changed, ledger, record
from attnscale.claims.judging import VERDICTS
from attnscale.claims.ledger import recorded
from attnscale.cli import app
from attnscale.errors import SettingError
from attnscale.lab.experiments import EXPERIMENTS

ROOT = Path(__file__).parents[2]
NAMES = {"post", "tutorial", "textbook", "forum"}


@pytest.fixture(scope="module")
def by_id(claims):
    return {claim.id: claim for claim in claims}


def test_exports_are_the_promised_ones():
    promised = {"Claim", "INDEX", "SOURCES", "VERDICTS", "Worked", "changed", "ledger", "record"}
    assert set(attnscale.claims.__all__) == promised


def test_a_claim_is_one_short_sentence_with_an_id_a_section_and_a_known_verdict(claims, by_id):
    assert {source.name for source in SOURCES} == {claim.source for claim in claims} == NAMES
    assert len(by_id) == len(claims) >= 100
    for claim in claims:
        assert re.fullmatch(r"[a-z0-9.-]+", claim.id)
        assert claim.claim.endswith(".")
        assert len(claim.claim) < 110
        assert claim.section
        assert claim.verdict in VERDICTS
        assert claim.note or claim.verdict == "confirmed"
        if isinstance(claim.computed, str) and ("drawn at" in claim.computed or "small models" in claim.computed):
            assert "±" in claim.computed, claim.id
    assert str(by_id["exp-50"].claimed) == str(int(math.exp(50)))[:-3]  # as its remark says
    assert (by_id["exp-50"].kind, by_id["gradient-flow"].kind) == ("arithmetic", "statement")


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_the_ledger_is_the_same_every_time_and_survives_json_with_exactly_nine_fields(claims, every):
    again = ledger([claim.id for claim in claims[::every]])
    assert again == claims[::every]
    for claim in again:
        fields = dataclasses.asdict(claim)
        assert list(fields) == ["id", "source", "section", "kind", "claim", "claimed", "computed", "verdict", "note"]
        assert json.loads(json.dumps(fields, allow_nan=False)) == fields


@pytest.mark.parametrize(
    ("id_", "verdict", "shown"),
    [
        ("exp-50", "refuted", "Claimed is 1000 times too small."),
        ("softmax-scaled-five", "refuted", "Largest difference 0.061; the claimed weights sum to 0.85."),
        ("softmax-peaked", "refuted", "Largest difference 0.34."),
        ("modern-llms-universal", "refuted", "Granite 3.1 2B 0.125"),
        ("inverse-dim-harms", "confirmed", "at d_k = 256"),
        ("trained-less-critical", "qualified", "removed from the bundled model"),
        ("avoids-exploding-and-vanishing", "confirmed", "on the median row's scores 0.0"),
        ("variance-always-exact", "confirmed", "6.1 at GPT-2's initialisation"),
        ("unscaled-stops-learning", "qualified", "median query at d_k = 64 over 64 keys: 4"),
        ("gradient-flow", "qualified", "median row at d_k = 512 over 64 keys: 0.0"),
        ("inputs-normalised", "qualified", "mean 0.71 after RMSNorm"),
        ("stable-training-any-dim", "qualified", "at a rate of 0.005, 3 of 3"),
        ("cost-negligible", "confirmed", "0.39%"),
    ],
)
def test_claims_are_judged_by_what_was_computed(by_id, id_, verdict, shown):
    assert by_id[id_].verdict == verdict
    assert shown in f"{by_id[id_].computed} {by_id[id_].note}"


# Recorded verdicts


def test_changed_verdicts_and_new_and_missing_claims_are_noticed(claims):
    assert recorded() == {claim.id: claim.verdict for claim in claims}
    assert changed(claims) == []
    flipped = [dataclasses.replace(claim, verdict="refuted") if claim.id == "exp-10" else claim for claim in claims]
    new = Claim("brand-new", "notes.txt", "1.", "statement", "It is so.", "so", "so", "confirmed", "")
    assert changed([*(claim for claim in flipped if claim.id != "exp-50"), new]) == [
        "'brand-new' is new: confirmed, with no recorded verdict.",
        "'exp-10' changed: it was recorded as confirmed and is now refuted.",
        "'exp-50' is gone: it was recorded as refuted.",
    ]


def test_record_writes_what_recorded_reads(claims, monkeypatch, tmp_path):
    before = recorded()
    monkeypatch.setattr(sys.modules["attnscale.claims.ledger"], "files", lambda package: tmp_path)
    record(reversed(claims))
    assert recorded() == before
    assert list(json.loads((tmp_path / "recorded.json").read_text(encoding="utf-8"))) == sorted(before)


def test_some_claims_can_be_asked_for_and_an_unknown_one_is_named():
    assert [claim.id for claim in ledger(["exp-5", "exp-10"])] == ["exp-5", "exp-10"]
    assert changed(ledger(["exp-5"]), whole=False) == []
    with pytest.raises(SettingError, match=r"Unknown claim 'exp-5O'\. Did you mean exp-5"):
        ledger(["exp-5O"])


# The command


def test_the_terminal_prints_ids_and_counts_arithmetic_separately(known_claims):
    shown = CliRunner().invoke(app, ["claims"], env={"COLUMNS": "140"}).output
    assert "gradient-flow" in shown
    of_the_tutorial = shown[shown.index("real-head-dims") :]
    assert of_the_tutorial.index("wider-is-worse") < of_the_tutorial.index("Plain arithmetic:")
    assert of_the_tutorial.index("Plain arithmetic:") < of_the_tutorial.index("exp-50")


def test_the_command_records_the_verdicts_it_shows(known_claims, monkeypatch):
    kept = []
    monkeypatch.setattr(attnscale.claims, "record", kept.append)
    run = CliRunner().invoke(app, ["claims", "--record", "--json"])
    assert run.exit_code == 0, run.output
    assert {claim.id: claim.verdict for claim in kept[0]} == recorded()
    alone = CliRunner().invoke(app, ["claims", "exp-5", "--record"])
    assert "Expected --record without ids" in str(alone.exception)


# The index

EXERCISES = ("standard deviation", "softmax([x, 0, 0, 0])", "with and without", "temperatures", "peaked and uniform")


def test_the_five_exercises_and_both_listings_are_in_the_index_and_shown_with_brackets():
    assert {worked.source for worked in INDEX} == NAMES
    exercises = [worked.what for worked in INDEX if worked.kind == "exercise"]
    for number, words in enumerate(EXERCISES, 1):
        assert any(what.startswith(f"{number}. ") and words in what for what in exercises)
    listings = {worked.what for worked in INDEX if worked.kind == "listing"}
    assert listings == {"scaled_dot_product_attention", "stable_softmax"}
    assert "softmax([x, 0, 0, 0])" in CliRunner().invoke(app, ["claims", "--index"]).output


@pytest.mark.parametrize("worked", INDEX, ids=lambda worked: worked.command)
def test_a_command_of_the_index_is_one_that_there_is(worked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, command, *arguments = shlex.split(worked.command)
    if program == "jupyter":
        assert (ROOT / arguments[0]).exists()
        return
    assert program == "attnscale"
    assert command != "claims"  # a verdict is nothing to see
    if command == "lab":
        assert arguments[0] in EXPERIMENTS
    elif command == "demo":
        assert not arguments
    else:
        quiet = ["--no-open"] if command == "explore" else []
        run = CliRunner().invoke(app, [command, *arguments, *quiet])
        assert run.exit_code == 0, run.output
