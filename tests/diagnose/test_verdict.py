import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from attnscale import score_stats
from attnscale.diagnose.checks import findings_of
from attnscale.diagnose.scores import score_findings
from attnscale.diagnose.verdict import head_verdicts, verdict_word
from attnscale.plain import readable

from .layers import codes, configured, layer_of, random_layer


def found(layer, trained=False):
    return [(finding.code, finding.severity) for finding in score_findings(layer, trained)]


def projected(d_model, heads, length, initialise, batch=2):
    """Query and key of a layer at initialisation, on normalised input."""
    x = F.layer_norm(torch.randn(batch, length, d_model), (d_model,))
    layers = [torch.nn.Linear(d_model, d_model) for _ in range(2)]
    for layer in layers:
        initialise(layer)
    return [layer(x).detach().unflatten(-1, (heads, -1)).transpose(1, 2) for layer in layers]


INITIALISATIONS = {
    "torch": lambda layer: None,
    "xavier": lambda layer: torch.nn.init.xavier_uniform_(layer.weight),
    "kaiming": lambda layer: torch.nn.init.kaiming_normal_(layer.weight),
    "gpt2": lambda layer: torch.nn.init.normal_(layer.weight, std=0.02),
    "orthogonal": lambda layer: torch.nn.init.orthogonal_(layer.weight),
}


@pytest.mark.parametrize("initialise", INITIALISATIONS.values(), ids=INITIALISATIONS)
@pytest.mark.parametrize(("d_model", "heads"), [(8, 4), (24, 3), (64, 2), (64, 64), (256, 4), (768, 12)])
@pytest.mark.parametrize(("length", "causal"), [(2, False), (7, True), (64, False), (64, True)])
def test_a_healthy_layer_at_initialisation_gets_nothing_at_all(initialise, d_model, heads, length, causal):
    layer = layer_of(*projected(d_model, heads, length, initialise), causal=causal)
    assert list(findings_of(layer, trained=False)) == []


def test_a_verdict_has_the_measured_numbers_beside_it():
    layer = random_layer(heads=2, head_dim=64, length=128, scale=1.0)
    for verdict, spread, gain in zip(
        head_verdicts(layer), layer.stats.std_within_rows.tolist(), layer.stats.jacobian_trace.tolist(), strict=True
    ):
        assert verdict.verdict == "sharp"
        assert (verdict.spread, verdict.jacobian_trace) == (spread, gain)
        assert verdict.keys == 128
        assert verdict.critical_spread == pytest.approx(math.sqrt(2 * math.log(128)))


@pytest.mark.parametrize(("spread", "verdict"), [(0.1, "diluted"), (1.0, "healthy"), (5.0, "sharp")])
def test_a_layer_has_the_verdict_its_heads_agree_on(spread, verdict):
    assert verdict_word(random_layer(length=64, query_std=spread), []) == verdict


def test_a_shift_of_whole_rows_does_not_saturate():
    # one direction that all keys share moves each row as a whole, which softmax does not see
    query, key = 4 * torch.randn(3, 2, 61, 16), 0.1 * torch.randn(3, 2, 61, 16)
    key[..., 0] += 40.0
    layer = layer_of(query, key)
    assert float(layer.stats.std.min()) > 10
    assert [verdict.spread for verdict in head_verdicts(layer)] == pytest.approx([0.4, 0.4], rel=0.05)
    assert {verdict.verdict for verdict in head_verdicts(layer)} == {"healthy"}
    assert found(layer) == [("exploding", "note")]


def test_one_visible_key_is_healthy():
    layer = layer_of(torch.randn(3, 2, 5, 7), torch.randn(3, 2, 1, 7))
    assert {verdict.verdict for verdict in head_verdicts(layer)} == {"healthy"}
    assert found(layer) == []


def test_a_frozen_head_is_a_warning_at_initialisation_and_a_note_when_trained():
    layer = random_layer(heads=3, length=64, query_std=torch.tensor([1.0, 30.0, 1.0]).view(3, 1, 1))
    findings = [finding for finding in score_findings(layer, trained=False) if finding.code == "sharp"]
    assert [(finding.head, finding.severity) for finding in findings] == [(1, "warning")]
    assert "norms" in findings[0].message
    assert ("sharp", "note") in found(layer, trained=True)


def test_a_layer_that_passes_no_gradient_is_an_error_at_initialisation_alone():
    layer = random_layer(length=32, query_std=100.0)
    assert ("sharp", "error") in found(layer)
    notes = [finding for finding in score_findings(layer, trained=True) if finding.code == "sharp"]
    assert {finding.severity for finding in notes} == {"note"}
    assert all(finding.advice.startswith("A backward pass shows") for finding in notes)
    assert [finding.head for finding in notes] == [0, 1, 2]


@pytest.mark.parametrize(("reached", "severity"), [(1e-5, "warning"), (0.5, "note"), (30.0, "note")])
def test_a_sharp_head_of_a_trained_model_is_judged_by_the_gradient_that_reached_it(reached, severity):
    layer = random_layer(heads=3, length=64, query_std=torch.tensor([1.0, 30.0, 1.0]).view(3, 1, 1))
    findings = score_findings(layer, True, torch.tensor([1.0, reached, 1.0]))
    (finding,) = (finding for finding in findings if finding.code == "sharp")
    assert (finding.head, finding.severity) == (1, severity)
    assert ("hardly learns" in finding.advice) == (severity == "warning")


def test_a_layer_with_a_frozen_head_is_not_healthy():
    layer = random_layer(heads=3, length=64, query_std=torch.tensor([1.0, 30.0, 1.0]).view(3, 1, 1))
    assert [verdict.verdict for verdict in head_verdicts(layer)] == ["healthy", "sharp", "healthy"]
    assert verdict_word(layer, []) == "sharp"


@pytest.mark.parametrize(("keys", "expected"), [(2, []), (3, []), (5, ["sharp"]), (64, ["sharp"])])
def test_two_or_three_keys_cannot_tell_a_frozen_layer(keys, expected):
    layer = layer_of(30 * torch.randn(2, 3, 8, 11), torch.randn(2, 3, keys, 11))
    assert [code for code, _ in found(layer) if code == "sharp"] == expected


def test_a_wrong_multiplier_is_the_cause_of_dilution():
    (finding,) = score_findings(random_layer(head_dim=64, scale=1 / 64), trained=False)
    assert (finding.code, finding.severity, finding.head) == ("diluted", "warning", None)
    assert "0.125" in finding.advice
    assert found(random_layer(head_dim=64, scale=1 / 64), trained=True) == [("diluted", "note")]


@given(std=st.floats(0.001, 0.4))
def test_small_weights_are_not(std):
    assert found(random_layer(length=9, batch=1, query_std=std, key_std=std)) == []


def test_a_chosen_multiplier_does_not_dilute():
    assert found(random_layer(head_dim=64, scale=1 / 64, declared=configured(1 / 64))) == []


def test_cosines_without_a_temperature_are_diluted():
    query, key = (F.normalize(torch.randn(3, 2, 31, 64), dim=-1) for _ in range(2))
    assert found(layer_of(query, key, 1.0, normalised=True)) == [("diluted", "warning")]
    assert found(layer_of(query, key, 10.0, normalised=True)) == []


def test_alike_tokens_under_a_qk_norm_are_not():
    query = F.normalize(torch.randn(3, 2, 1, 64), dim=-1).expand(3, 2, 31, 64)
    assert found(layer_of(query, query, 10.0, normalised=True)) == []


@pytest.mark.parametrize(
    ("largest", "severity"), [(99.0, None), (150.0, "note"), (2e3, "warning"), (9e3, "warning"), (2e4, "error")]
)
def test_the_largest_score_is_held_to_what_was_published(largest, severity):
    query, key = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 5, 4)
    query[..., 0], key[0, 0, 2, 0] = 1.0, largest
    findings = [finding for finding in score_findings(layer_of(query, key, 1.0), True) if finding.code == "exploding"]
    assert [finding.severity for finding in findings] == ([] if severity is None else [severity])
    assert all(finding.measured == pytest.approx(largest) for finding in findings)


def test_a_sampled_maximum_is_bracketed():
    layer = random_layer(length=200, query_std=100.0)
    sampled = replace(layer, stats=score_stats(layer.query, layer.key, rows=8))
    (finding,) = (finding for finding in score_findings(sampled, False) if finding.code == "exploding")
    assert f"at most {readable(float(sampled.stats.max_bound.max()), 4)} in all" in finding.message


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_no_numbers_are_an_error_and_nothing_else_is_said(value):
    query = torch.randn(1, 2, 5, 7)
    query[0, 1, 2, 3] = value
    findings = list(findings_of(layer_of(query, torch.randn(1, 2, 6, 7), 1.0), trained=True))
    assert [(finding.code, finding.severity) for finding in findings] == [("non_finite", "error")]
    assert findings[0].message.startswith("1 of 2 heads")


def test_a_softmax_over_another_axis_has_no_saturated_rows():
    layer = random_layer(length=32, query_std=30.0, mixes_along_softmax=False)
    assert "sharp" not in codes(score_findings(layer, trained=False))


def test_sampled_rows_tell_the_keys_that_all_rows_see():
    query, key = (torch.randn(1, 3, 257, 11) for _ in range(2))
    assert score_stats(query, key, is_causal=True).keys.tolist() == pytest.approx([129.0] * 3)
    samples = [score_stats(query, key, is_causal=True, rows=31) for _ in range(100)]
    on_average = torch.stack([sample.keys for sample in samples]).mean(0)
    assert on_average.tolist() == pytest.approx([129.0] * 3, rel=0.02)  # though the first rows are all looked at
    layer = replace(layer_of(query, key, causal=True), stats=samples[0])
    assert [head.keys for head in head_verdicts(layer)] == pytest.approx(samples[0].keys.tolist())
