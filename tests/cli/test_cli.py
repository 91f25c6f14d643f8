"""The command line, through its entry point, by what it prints and how it exits."""

import json
import os
import re
import subprocess
import sys

import pytest

from attnscale.cli import app
from attnscale.rules import RULES
from attnscale.theory import predict

from .running import in_a_process, run

PREDICT = ["predict", "--d-model", "768", "--heads", "12", "--init", "normal:0.02", "--length", "1024"]


def test_predict_prints_the_candidates_and_one_sentence_of_advice():
    result = in_a_process(*PREDICT)
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.split()}
    assert rows["none"] == ["1", "2.46", "4.25", "61.4", "0.180", "0.932", "healthy"]
    assert rows["1/√d_k"] == ["0.125", "0.307", "6.88", "99.3", "0.003", "0.999", "healthy"]
    assert rows["1/d_k"][0] == "0.01562"
    assert rows["calibrated"][:2] == ["0.4069", "1"]
    assert " ".join(result.stdout.split()).endswith("stays below the critical spread.")


def test_predict_json_is_the_prediction():
    printed = json.loads(run(*PREDICT, "--json").stdout)
    prediction = predict(768, 12, 1024, initialisation="normal:0.02")
    assert printed == json.loads(json.dumps(prediction.to_dict()))
    assert [c["name"] for c in printed["candidates"]] == ["unscaled", "inverse_sqrt", "inverse_dim", "calibrated"]
    assert printed["candidates"][1]["softmax"]["entropy_ratio"] == pytest.approx(0.993, abs=1e-3)


@pytest.mark.parametrize("command", [PREDICT, ["rules"], ["--help"], ["predict", "--help"]])
def test_output_in_a_pipe_fits_80_columns_and_has_no_colour(command):
    result = run(*command)
    assert result.returncode == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\x1b[" not in result.stdout


def test_rules_lists_every_rule_with_formula_source_and_use():
    text = run("rules").stdout
    assert all(name in text for name in RULES)
    entries = json.loads(run("rules", "--json").stdout)
    assert [entry["name"] for entry in entries] == list(RULES)
    assert all(entry[field] for entry in entries for field in ("call", "formula", "source", "use"))
    assert {entry["name"] for entry in entries if entry["learned"]} == {
        "LearnedTemperature", "QueryTemperature", "QKNorm", "Cosine",
    }  # fmt: skip


def test_claims_prints_the_ledger_and_what_is_refuted(known_claims):
    result = run("claims")
    assert result.returncode == 0
    assert re.search(r"\d+ statements: \d+ confirmed, \d+ qualified, \d+ refuted\.", result.stdout)
    assert re.search(r"\d+ numbers by plain arithmetic: \d+ confirmed, \d+ refuted\.", result.stdout)
    assert "1000 times too small" in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_claims_json_is_a_list_of_objects_with_the_fields_of_a_claim(claims_file):
    claims = json.loads(claims_file.read_text(encoding="utf-8"))
    assert len(claims) >= 40
    expected = ["id", "source", "section", "kind", "claim", "claimed", "computed", "verdict", "note"]
    assert all(list(claim) == expected for claim in claims)
    asked = ["exp-5", "exp-10", "exp-50"]
    refuted = json.loads(run("claims", *asked, "--json", "--verdict", "refuted").stdout)
    assert refuted == [claim for claim in claims if claim["id"] in asked and claim["verdict"] == "refuted"] != []


def test_claims_ends_with_status_one_when_a_verdict_changed():
    code = """
import importlib, sys
from attnscale.cli import main
ledger = importlib.import_module("attnscale.claims.ledger")
flipped = ledger.recorded() | {"exp-50": "confirmed"}
ledger.recorded = lambda: flipped
sys.argv = ["attnscale", "claims", "exp-50", "exp-5", "--json"]
main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "'exp-50' changed: it was recorded as confirmed and is now refuted." in result.stderr


def test_bench_prints_ratios_and_their_meaning_and_writes_them_with_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("attnscale.bench.costs.ROUNDS", 2)
    path = tmp_path / "new" / "costs.json"
    result = run("bench", "--device", "cpu", "--quick", "--out", str(path))
    assert result.returncode == 0, result.stderr
    assert "plain SDPA, flash" in result.stdout
    assert "× plain: time relative to the fastest plain SDPA" in result.stdout
    assert "timed as" not in result.stdout  # all calls from Python
    recorded = json.loads(path.read_text(encoding="utf-8"))
    assert recorded["machine"]["torch"]
    ratios = {cost["variant"]: cost["calls"]["ratio"] for cost in recorded["costs"]}
    assert ratios["plain SDPA, flash"] == 1.0
    assert {"attnscale, every row", "attnscale, 64 rows", "eager with statistics"} <= ratios.keys()
    assert ratios["plain SDPA, as many tokens, flash"] == 1.0
    assert {f"attnscale, {way}, every row" for way in ("packed", "jagged")} | {"padded, with a mask"} <= ratios.keys()
    assert "4 sequences of 64 to 1024, 4 heads of 64, float32, causal, forward" in result.stdout


def test_the_help_of_every_command_has_an_example():
    helps = {command.callback.__name__: command.help for command in app.registered_commands}
    assert len(helps) >= 9
    for name, text in helps.items():
        *paragraphs, example = text.split("\n\n")
        assert example.startswith(f"Example: attnscale {name.replace('_', '-')}")
        assert not any("\n" in paragraph for paragraph in paragraphs)  # the terminal breaks lines


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["predict", "--heads", "7"], "Expected heads that divide d_model, got d_model=768 and heads=7"),
        (["predict", "--init", "gauss"], "Unknown initialisation 'gauss'. Expected one of: kaiming, lecun, normal"),
        (["predict", "--length", "1"], "Expected length of at least 2, got 1."),
        (["claims", "--verdict", "maybe"], "Unknown verdict 'maybe'. Expected one of: confirmed, qualified, refuted."),
        (["bench", "--kind", "sparse"], "Expected a kind of case, dense or ragged, got 'sparse'."),
        (["bench", "--device", "tpu"], "Expected a device that this machine has, cpu or cuda, got 'tpu'."),
        (["predict", "--init", "normal:1e200"], "weights by normal:1e+200 on inputs of variance 1 give none"),
        (["predict", "--input-variance", "1e308"], "Expected scores of a finite spread above zero"),
        (
            ["predict", "--d-model", f"1{'0' * 400}", "--heads", "1"],
            "Expected d_model, heads, head_dim and length of at most 1e+18, got more.",
        ),
        (["predict", "--heads", "many"], "Invalid value for '--heads': "),
        (["predict", "--heads"], "Option '--heads' requires an argument"),
        (["watch-log"], "Missing argument"),
        (["predict", "--bogus"], "No such option: --bogus"),
        (["nonsense"], "No such command 'nonsense'"),
    ],
)
def test_bad_input_ends_with_status_two_one_sentence_and_no_traceback(arguments, sentence):
    result = run(*arguments)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("attnscale: ")
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "--length", "100000000"],
        ["check", "--text", os.devnull],
        ["check", "--data", os.devnull],
        ["check", "--html", "."],
        ["compare", "bundled", "bundled", "--length", "100000000"],
    ],
)
def test_bad_input_is_refused_before_torch_is_imported(arguments):
    code = "import sys; sys.modules |= dict.fromkeys(['torch', 'transformers']); from attnscale.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("attnscale: Expected ")
    assert len(result.stderr.splitlines()) == 1


def test_a_stream_without_unicode_does_not_fail():
    assert in_a_process("predict", PYTHONIOENCODING="ascii").returncode == 0


def test_help_answers_at_once():
    def seconds():  # of the processor: on a busy machine the clock tells of others
        before = os.times()
        assert in_a_process("--help").returncode == 0
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert any(seconds() < 0.4 for _ in range(3))
