import dataclasses
import json
import math
import re
import sys

import pytest
from typer.testing import CliRunner

import attnscale.claims
from attnscale.claims import SOURCES, Claim, changed, ledger, record
from attnscale.claims.judging import VERDICTS
from attnscale.claims.ledger import recorded
from attnscale.cli import app
from attnscale.errors import SettingError

NAMES = {"post", "tutorial", "textbook", "forum"}

# What the sources say with a reserve, and how the claim says it.
HEDGED = {
    "unit-variance-common": "commonly",
    "large-scores-sharpen": "can",
    "scaled-variance-near-one": "about",
    "inverse-dim-precision": "might in some cases",
    "inverse-dim-harms": "potentially",
    "inputs-normalised": "typically",
    "xavier-unit-variance": "typically",
    "trained-controlled": "may",
    "trained-less-critical": "less",
    "learned-temperature": "Some",
    "efficient-learn-temperature": "Some",
    "wide-range-of-dims": "a wide range",
    "struggles-without": "struggle",
}


@pytest.fixture(scope="module")
def by_id(claims):
    return {claim.id: claim for claim in claims}


def test_exports_are_the_promised_ones():
    promised = {"Claim", "INDEX", "SOURCES", "VERDICTS", "Worked", "changed", "ledger", "record"}
    assert set(attnscale.claims.__all__) == promised


def test_every_source_is_there_and_has_claims(claims):
    assert {source.name for source in SOURCES} == NAMES
    assert {claim.source for claim in claims} == NAMES


@pytest.mark.parametrize(("id_", "hedge"), HEDGED.items())
def test_a_claim_carries_its_sources_hedge(by_id, id_, hedge):
    assert hedge in by_id[id_].claim


def test_there_are_many_claims_with_ids_of_their_own(claims):
    assert len(claims) >= 100
    assert len({claim.id for claim in claims}) == len(claims)
    assert all(re.fullmatch(r"[a-z0-9.-]+", claim.id) for claim in claims)


def test_a_claim_is_one_short_sentence_with_a_known_verdict(claims):
    for claim in claims:
        assert claim.claim.endswith(".")
        assert len(claim.claim) < 110
        assert claim.verdict in VERDICTS


def test_every_claim_names_its_section_and_plain_arithmetic_is_marked(claims, by_id):
    assert all(claim.section for claim in claims)
    assert (by_id["exp-50"].kind, by_id["gradient-flow"].kind) == ("arithmetic", "statement")


def test_what_is_drawn_or_trained_has_its_error(claims):
    for claim in claims:
        if isinstance(claim.computed, str) and ("drawn at" in claim.computed or "small models" in claim.computed):
            assert "±" in claim.computed, claim.id


def test_the_terminal_prints_ids_and_arithmetic_apart(claims, monkeypatch):
    monkeypatch.setattr(attnscale.claims, "ledger", lambda ids: claims)
    shown = CliRunner().invoke(app, ["claims"], env={"COLUMNS": "140"}).output
    assert "gradient-flow" in shown
    of_the_tutorial = shown[shown.index("real-head-dims") :]
    assert of_the_tutorial.index("wider-is-worse") < of_the_tutorial.index("Plain arithmetic:")
    assert of_the_tutorial.index("Plain arithmetic:") < of_the_tutorial.index("exp-50")


def test_whatever_is_not_confirmed_says_why(claims):
    assert all(claim.note for claim in claims if claim.verdict != "confirmed")


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_the_ledger_is_the_same_every_time_and_survives_json_with_exactly_nine_fields(claims, every):
    again = ledger([claim.id for claim in claims[::every]])
    assert again == claims[::every]
    for claim in again:
        fields = dataclasses.asdict(claim)
        assert list(fields) == ["id", "source", "section", "kind", "claim", "claimed", "computed", "verdict", "note"]
        assert json.loads(json.dumps(fields, allow_nan=False)) == fields


def test_e_to_the_50_is_refuted_by_a_factor_of_a_thousand(by_id):
    claim = by_id["exp-50"]
    assert (claim.verdict, claim.claimed) == ("refuted", 5184705528587072045)
    assert claim.note.startswith("Claimed is 1000 times too small.")
    assert str(int(math.exp(50)))[:-3] == str(claim.claimed)  # as its remark says


def test_the_scaled_five_key_softmax_is_refuted_for_not_summing_to_one(by_id):
    claim = by_id["softmax-scaled-five"]
    assert (claim.verdict, claim.note) == ("refuted", "Largest difference 0.061; the claimed weights sum to 0.85.")
    assert sum(claim.computed) == pytest.approx(1, abs=1e-3)


def test_the_peaked_softmax_is_refuted(by_id):
    claim = by_id["softmax-peaked"]
    assert claim.verdict == "refuted"
    assert claim.note.startswith("Largest difference 0.34.")


@pytest.mark.parametrize(
    ("id_", "computed"),
    [
        ("exp-20", 485165195.41),
        ("softmax-14-10-12", [0.86681, 0.01588, 0.11731]),
        ("softmax-five", [0.59857, 0.0, 0.40123, 0.0, 0.0002]),
        ("mixed-gradients", [0.21, 0.21, 0.16, 0.16]),
        ("cross-terms-64", 4032),
        ("variance-1-2-3", 0.6667),
        ("scaled-example-logits", [-2.5, 0.375, 3.125, -1.875]),
        ("variance-64", 64),
        ("saturation-exercise", "weight 0.99 at x = 5.69"),
    ],
)
def test_right_numbers_are_confirmed(by_id, id_, computed):
    assert (by_id[id_].verdict, by_id[id_].computed) == ("confirmed", computed)


@pytest.mark.parametrize(
    ("id_", "verdict", "shown"),
    [
        ("modern-llms-universal", "refuted", "Granite 3.1 2B 0.125"),
        ("inverse-dim-precision", "confirmed", "in 4 of 4 cases"),
        ("large-scores-sharpen", "confirmed", "0% ± 0.0% with it"),
        ("inverse-dim-harms", "confirmed", "at d_k = 256"),
        ("trained-controlled", "confirmed", "the bundled model's scores"),
        ("trained-less-critical", "qualified", "removed from the bundled model"),
        ("height-ranges", "confirmed", "0.021 against 1.36"),
        ("wide-range-of-dims", "confirmed", "at 256"),
        ("learned-temperature", "confirmed", "Swin-v2 (one temperature a head)"),
        ("avoids-exploding-and-vanishing", "confirmed", "on the median row's scores 0.0"),
        ("validated-widely", "confirmed", "LLaMA-2 7B"),
        ("variance-always-exact", "confirmed", "6.1 at GPT-2's initialisation"),
        ("xavier-unit-variance", "qualified", "(nn.MultiheadAttention)"),
        ("unscaled-stops-learning", "qualified", "median query at d_k = 64 over 64 keys: 4"),
        ("gradient-flow", "qualified", "median row at d_k = 512 over 64 keys: 0.0"),
        ("inputs-normalised", "qualified", "mean 0.71 after RMSNorm"),
        ("stable-training-any-dim", "qualified", "at a rate of 0.005, 3 of 3"),
        ("gpt-standard", "confirmed", "GPT-2 1"),
        ("cost-negligible", "confirmed", "0.39%"),
    ],
)
def test_statements_are_judged_by_what_was_computed(by_id, id_, verdict, shown):
    assert by_id[id_].verdict == verdict
    assert shown in by_id[id_].computed


def test_recorded_verdicts_are_the_computed_ones(claims):
    assert recorded() == {claim.id: claim.verdict for claim in claims}
    assert changed(claims) == []


def test_a_flipped_verdict_is_noticed(claims):
    flipped = [dataclasses.replace(claim, verdict="refuted") if claim.id == "exp-10" else claim for claim in claims]
    assert changed(flipped) == ["'exp-10' changed: it was recorded as confirmed and is now refuted."]


def test_a_new_and_a_missing_claim_are_noticed(claims):
    new = Claim("brand-new", "notes.txt", "1.", "statement", "It is so.", "so", "so", "confirmed", "")
    assert changed([*(claim for claim in claims if claim.id != "exp-50"), new]) == [
        "'brand-new' is new: confirmed, with no recorded verdict.",
        "'exp-50' is gone: it was recorded as refuted.",
    ]


def test_record_writes_what_recorded_reads(claims, tmp_path):
    path = tmp_path / "recorded.json"
    record(reversed(claims), path)
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written == recorded()
    assert list(written) == sorted(written)


def test_some_claims_can_be_asked_for_and_an_unknown_one_is_named():
    assert [claim.id for claim in ledger(["exp-5", "exp-10"])] == ["exp-5", "exp-10"]
    assert changed(ledger(["exp-5"]), whole=False) == []
    with pytest.raises(SettingError, match=r"Unknown claim 'exp-5O'\. Did you mean exp-5"):
        ledger(["exp-5O"])


def test_the_command_records_the_verdicts_it_shows(claims, monkeypatch):
    kept = []
    monkeypatch.setattr(attnscale.claims, "ledger", lambda ids: claims)
    monkeypatch.setattr(attnscale.claims, "record", kept.append)
    run = CliRunner().invoke(app, ["claims", "--record", "--json"])
    assert run.exit_code == 0, run.output
    assert {claim.id: claim.verdict for claim in kept[0]} == recorded()
    alone = CliRunner().invoke(app, ["claims", "exp-5", "--record"])
    assert "Expected --record without ids" in str(alone.exception)


def test_a_record_goes_by_itself_to_where_verdicts_are_compared(claims, monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules["attnscale.claims.ledger"], "files", lambda package: tmp_path)
    record(claims)
    assert changed(claims) == []
    assert (tmp_path / "recorded.json").exists()
