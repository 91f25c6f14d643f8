"""Conclusions from findings, and the lines of the table."""

from dataclasses import replace

import pytest
import torch
import transformers
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

from attnscale.checking import check_model
from attnscale.checking.checked import line_of
from attnscale.declared import Authority, Declared
from attnscale.diagnose import Audit, Finding
from attnscale.diagnose.finding import grouped
from attnscale.diagnose.verdict import worst_code
from attnscale.lab.demo import TwinRun, Twins
from attnscale.loading import Request
from attnscale.show.lab import show_twins
from attnscale.show.live_table import LiveTable
from attnscale.show.report import report_page
from attnscale.show.tables import NO_ALARM
from attnscale.show.text import place
from attnscale.train.record import LayerRecord, Record
from attnscale.watching import Layer
from tests.checking.broken import D_MODEL, HEADS

BROKEN = "tests.checking.broken:"


def finding(layer, code="sharp", severity="warning", head=None):
    return Finding(layer, head, code, severity, "It is so.", None, None, "Do this.")


def test_equal_findings_are_grouped_and_sorted_by_severity():
    groups = grouped(
        [
            finding("blocks.1", head=2),
            finding("blocks.0", "unscaled", "error"),
            finding("blocks.3", "diluted"),
            finding("blocks.4", "diluted"),
            finding("blocks.1", head=5),
            finding("blocks.2", head=5, severity="note"),
        ]
    )
    assert [(group.first.code, group.first.severity, len(group.findings)) for group in groups] == [
        ("unscaled", "error", 1), ("diluted", "warning", 2), ("sharp", "warning", 2), ("sharp", "note", 1),
    ]  # fmt: skip
    assert [place(group) for group in groups] == [
        "blocks.0", "blocks.*, * = 3–4", "blocks.1, heads 2, 5", "blocks.2, head 5",
    ]  # fmt: skip


def test_layers_of_different_kinds_are_counted_where_they_cannot_be_numbered():
    group = grouped([finding("encoder.0"), finding("decoder.0"), finding("decoder.1")])[0]
    assert place(group) == "encoder.0, and 2 more layers"


def test_the_expected_spread_is_that_of_independent_queries_and_keys():
    layer = check_model(Request(f"{BROKEN}unscaled")).audit.layers["layers.0"]
    layer = replace(layer, query_norm=torch.tensor([3.0, 5.0]), key_norm=torch.tensor([7.0, 11.0]))
    # 1/√d_k · ‖q‖ ‖k‖ / √d_k, whatever scale was applied
    assert line_of(layer, []).spread_expected == pytest.approx((3 * 7 + 5 * 11) / 2 / (D_MODEL // HEADS))
    declared = replace(layer, declared=Declared(scale=-0.5, scale_authority=Authority.CONFIGURED))
    assert line_of(declared, []).spread_expected == pytest.approx(38 * 0.5 / (D_MODEL // HEADS) ** 0.5)


def test_warnings_of_attnscale_become_notes_and_those_of_the_model_do_not():
    assert check_model(Request(f"{BROKEN}warns")).notes == ("Two modules were left out.",)


def test_the_layer_in_focus_is_the_one_found_worst_or_the_widest():
    assert check_model(Request(f"{BROKEN}unscaled")).focus == "layers.0"
    fine = check_model(Request(f"{BROKEN}healthy"))
    assert fine.focus == max(fine.lines, key=lambda line: line.spread).name
    assert check_model(Request(f"{BROKEN}healthy"), what_if="layers.1").focus == "layers.1"


def test_warnings_alone_are_no_errors():
    checked = check_model(Request(f"{BROKEN}healthy"))
    warned = Audit(checked.audit.layers, False, [finding("layers.0")])
    checked = type(checked)("t", "f", "cpu", None, (), warned)
    assert not checked.has_errors
    assert checked.conclusion.startswith("No errors, but a warning: in layers.0, the scores of a row lie so far")


def test_the_verdict_of_a_layer_is_its_finding_or_the_state_of_its_heads():
    layer: Layer = check_model(Request(f"{BROKEN}unscaled")).audit.layers["layers.0"]
    assert line_of(layer, []).verdict_text == "sharp"
    assert line_of(layer, [finding("layers.0", "unscaled", "error")]).verdict_text == "unscaled"
    assert line_of(layer, [finding("layers.0", "sharp", "note")]).verdict_text == "sharp"


def test_checking_leaves_no_trace():
    before = torch.get_rng_state()
    check_model(Request())
    assert torch.equal(before, torch.get_rng_state())
    assert torch.is_grad_enabled()


@pytest.fixture
def knows_three_words(tmp_path):
    """A trained BERT of which one head is frozen, whose tokenizer has three words."""
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.BertModel(config)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.weight += 0.1 * torch.randn_like(module.weight)
        model.encoder.layer[1].attention.self.query.weight[:12] *= 1e7
    model.save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "why": 1, "root": 2, "d": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("known", "told", "concludes"), [(30, False, "Not fine"), (27, True, "Not fine"), (15, True, "Cannot tell")]
)
def test_a_model_is_not_judged_by_words_it_does_not_know(knows_three_words, known, told, concludes):
    text = " ".join(["why root d"] * (known // 3) + ["what"] * (30 - known))
    checked = check_model(Request(knows_three_words, text=text))
    assert checked.conclusion.startswith(concludes)
    assert [note for note in checked.notes if "unknown" in note] == ([checked.notes[0]] if told else [])
    assert bool(checked.audit.unjudged) == (concludes == "Cannot tell")
    codes = {each.code for each in checked.audit.findings}
    assert ("exploding" in codes) == (concludes == "Not fine")


def test_nothing_is_fine_past_the_critical_spread_at_initialisation():
    past = check_model(Request(f"{BROKEN}past_critical_spread"))
    assert not past.audit.trained
    assert past.audit.worst in (None, "note")
    assert "past the critical spread from the start" in past.conclusion
    assert check_model(Request(f"{BROKEN}healthy")).conclusion.startswith("Fine: ")


def test_the_word_for_a_layer_is_the_same_in_table_json_report_and_audit():
    for name in ("unscaled", "healthy", "past_critical_spread"):
        checked = check_model(Request(f"{BROKEN}{name}"))
        audited, told = checked.audit.to_dict()["layers"], checked.to_dict()["layers"]
        page = report_page(checked)
        for line in checked.lines:
            assert audited[line.name]["verdict"] == told[line.name]["verdict"] == line.verdict
            assert line.verdict_text.startswith(line.verdict)
            assert line.verdict_text in page
            assert checked.audit.words[line.name] == line.verdict
            (row,) = (row for row in str(checked.audit).splitlines() if row.split()[0:1] == [line.name])
            assert row.endswith(f" {line.verdict}")


def test_the_demo_and_the_table_of_a_run_use_the_same_words(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    audit = check_model(Request(f"{BROKEN}unscaled")).audit
    show_twins(Twins("t", "v", (), (TwinRun("unscaled", (), (), audit),)), Console())
    live = LiveTable()
    live(Record(3, 0.0, {name: LayerRecord(1, {}) for name in audit.layers}, audit.findings))
    live.close()
    shown = capsys.readouterr().out
    for name, word in audit.words.items():
        assert f"{name} {word}" in shown  # of the demo
        (row,) = (row.split() for row in shown.splitlines() if row.split()[:1] == [name])  # of the run
        assert row[-1] == (word if worst_code(name, audit.findings) else NO_ALARM)


def test_uncertain_heads_are_counted_in_the_conclusion():
    few = check_model(Request(f"{BROKEN}healthy"), rows=4)
    unsure = sum(line.heads_by_verdict.get("uncertain", 0) for line in few.lines)
    assert unsure > 0
    assert few.conclusion.endswith(f"{unsure} uncertain heads.")
    assert "uncertain" not in check_model(Request(f"{BROKEN}healthy")).conclusion
