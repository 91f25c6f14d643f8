"""`attnscale compare`, `check --save` and `check --against`, by what they print and how they exit."""

import json

import pytest
import torch

import attnscale
from attnscale.models import CausalTransformer
from tests.cli import running

CHANGED = "tests.comparing.models:changed"
SHORT = ("--length", "64")


def run(*arguments, **environment):
    """Run a command in this process: status, stdout, stderr."""
    result = running.run(*arguments, **environment)
    return result.returncode, result.stdout, result.stderr


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "baseline.json"
    assert run("check", *SHORT, "--save", path)[::2] == (0, "")
    return path


def test_an_unchanged_model_passes(baseline):
    status, out, err = run("check", *SHORT, "--against", baseline)
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "No head of 16 changed by more than its error."


def test_a_worse_head_fails_and_is_named(baseline):
    status, out, _ = run("check", CHANGED, *SHORT, "--against", baseline, "--json", FACTOR="1.5")
    found = json.loads(out)["comparison"]
    assert status == 1
    assert [(head["layer"], head["head"]) for head in found["changed"]] == [("blocks.1.attention", 2)]
    assert "blocks.1.attention, head 2" in " ".join(found["worse"])
    by_head = {(head["layer"], head["head"]): head for head in found["heads"]}
    spread = by_head["blocks.1.attention", 2]["moves"]["spread"]
    assert spread["after"] / spread["before"] == pytest.approx(1.5, rel=0.01)
    assert spread["error"] is not None


def test_a_better_head_passes(baseline):
    status, out, _ = run("check", CHANGED, *SHORT, "--against", baseline, FACTOR="0.8")
    assert status == 0
    assert "blocks.1.attention, head 2" in out
    assert "‖q‖ × 0.8" in out


@pytest.mark.parametrize(("tolerance", "status"), [("0.1", 1), ("0.5", 0)])
def test_a_change_below_the_tolerance_is_ignored(baseline, tolerance, status):
    assert run("check", CHANGED, *SHORT, "--against", baseline, "--tolerance", tolerance, FACTOR="1.2")[0] == status


def test_compare_prints_writes_and_fits(baseline, tmp_path):
    page = tmp_path / "report.html"
    status, out, err = run("compare", baseline, CHANGED, *SHORT, "--html", page, FACTOR="2")
    assert (status, err) == (0, f"attnscale: The report is in {page}.\n")
    assert max(map(len, out.splitlines())) <= 80
    assert "blocks.1.attention, head 2" in out
    assert "spread" in out
    text = page.read_text(encoding="utf-8")
    assert "Head by head" in text
    assert "blocks.1.attention, head 2" in text


HEAD = '{"kind": "attnscale check", "version": 2, "title": "", "fed": "", "inputs": "", "layers": '


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "damaged"),
        ("[]", "there is no kind"),
        ('{"kind": "attnscale check", "version": 9}', "version"),
        (HEAD + '{"a": {}}}', "samples"),
        (HEAD + '{"a": {"samples": {"spread": [[1, 2], [1]]}}}}', "inhomogeneous"),
        (
            HEAD + '{"a": {"samples": {"spread": [[1]], "scale_applied": [[1, 2]]}}}}',
            "(samples, heads) for every statistic",
        ),
        (HEAD + '{"a": {"samples": {"spread": [[1e999]]}}}}', "infinite"),
        (HEAD + '{}, "findings": [{"layer": "a"}]}', "missing"),
    ],
)
def test_a_damaged_baseline_is_one_sentence(tmp_path, content, reason):
    path = tmp_path / "baseline.json"
    path.write_text(content, encoding="utf-8")
    status, out, err = run("check", "--against", path)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert reason in err


def test_a_missing_baseline_is_one_sentence_before_any_work(tmp_path):
    status, _, err = run("check", "no/such/model", "--against", tmp_path / "none.json")
    assert status == 2
    assert "none.json" in err


def recorded(path, factor):
    """A run of eleven records, in which one head's queries are longer."""
    torch.manual_seed(3)
    model = CausalTransformer(vocabulary=64, d_model=44, layers=2, heads=2)
    with torch.no_grad():
        model.blocks[1].attention.query.weight[:22] *= factor
    monitor = attnscale.Monitor(model, every=1, sinks=[str(path)])
    for step in range(11):
        torch.manual_seed(step)
        tokens = torch.randint(0, 64, (6, 24))
        model(tokens).square().mean().backward()
        model.zero_grad()
        monitor.step()
    monitor.close()
    return path


def test_runs_are_compared_by_their_latest_records(tmp_path):
    before, after = recorded(tmp_path / "a.jsonl", 1.0), recorded(tmp_path / "b.jsonl", 2.0)
    status, out, _ = run("compare", before, after, "--json")
    found = json.loads(out)
    assert status == 0
    assert {(head["layer"], head["head"]) for head in found["changed"]} == {("blocks.1.attention", 0)}
    moves = found["heads"][2]["moves"]
    assert moves["query_norm"]["change"] == pytest.approx(0.693, abs=0.05)
    assert "query_gradient" in moves
    again = json.loads(run("compare", before, f"{before}#1", "--json")[1])
    assert again["changed"] == []
    assert run("compare", before, f"{before}#7")[0] == 2
    assert run("compare", before, tmp_path / "none.jsonl")[0] == 2


def test_two_without_a_common_layer_end_with_status_two(baseline, tmp_path):
    saved = json.loads(baseline.read_text(encoding="utf-8"))
    saved["layers"] = {f"other.{name}": layer for name, layer in saved["layers"].items()}
    (tmp_path / "other.json").write_text(json.dumps(saved), encoding="utf-8")
    status, out, err = run("compare", baseline, tmp_path / "other.json")
    assert status == 2
    assert out.splitlines()[-1] == "Nothing to compare: the two have no layer in common."
    assert err == "attnscale: No layer was compared, so the exit status is 2.\n"
