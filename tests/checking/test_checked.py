"""What is concluded from findings, and what a line of the table says."""

from dataclasses import replace

import pytest
import torch

from attnscale.checking import check_model
from attnscale.checking.grouped import grouped
from attnscale.checking.line import line_of
from attnscale.diagnose import Audit, Finding
from attnscale.loading import Request
from attnscale.show.check import place
from attnscale.watching import Layer
from tests.checking.broken import D_MODEL, HEADS

BROKEN = "tests.checking.broken:"


def finding(layer, code="saturated", severity="warning", head=None):
    return Finding(layer, head, code, severity, "It is so.", None, None, "Do this.")


def test_findings_that_say_the_same_are_told_once_the_worst_first():
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
        ("unscaled", "error", 1), ("diluted", "warning", 2), ("saturated", "warning", 2), ("saturated", "note", 1),
    ]  # fmt: skip
    assert [place(group) for group in groups] == [
        "blocks.0", "blocks.*, * = 3–4", "blocks.*, * = 1 (2 heads)", "blocks.2, head 5",
    ]  # fmt: skip


def test_layers_of_different_kinds_are_counted_where_they_cannot_be_numbered():
    group = grouped([finding("encoder.0"), finding("decoder.0"), finding("decoder.1")])[0]
    assert place(group) == "encoder.0, and 2 more layers"


def test_the_expected_spread_is_that_of_independent_queries_and_keys():
    layer = check_model(Request(f"{BROKEN}unscaled")).audit.layers["layers.0"]
    layer = replace(layer, query_norm=torch.tensor([3.0, 5.0]), key_norm=torch.tensor([7.0, 11.0]))
    # 1/√d_k · ‖q‖ ‖k‖ / √d_k, whatever scale was applied
    assert line_of(layer, []).expected_spread == pytest.approx((3 * 7 + 5 * 11) / 2 / (D_MODEL // HEADS))
    declared = replace(layer, declared=replace(layer.declared, scale=-0.5))
    assert line_of(declared, []).expected_spread == pytest.approx(38 * 0.5 / (D_MODEL // HEADS) ** 0.5)


def test_what_watching_could_not_follow_is_noted_and_what_the_model_warns_of_is_not():
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
    assert checked.conclusion.startswith("No errors, but a warning: in 1 of 2 layers, the scores lie so far apart")


def test_a_verdict_without_a_finding_is_excused_and_explained():
    layer: Layer = check_model(Request(f"{BROKEN}unscaled")).audit.layers["layers.0"]
    assert line_of(layer, []).judgement == "sharp"
    assert line_of(layer, [finding("layers.0", "unscaled", "error")]).judgement == "unscaled"
    assert line_of(layer, [finding("layers.0", "saturated", "note")]).judgement == "sharp"


def test_checking_leaves_no_trace():
    before = torch.get_rng_state()
    check_model(Request())
    assert torch.equal(before, torch.get_rng_state())
    assert torch.is_grad_enabled()
