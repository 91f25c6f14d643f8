"""Findings from the scores of a layer: verdicts on heads, and the findings that follow."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import attnscale
from attnscale import audit, score_stats
from attnscale.diagnose import diagnose, head_verdicts
from attnscale.diagnose.scores import UNREACHED, gradient_shares, score_findings
from attnscale.diagnose.verdict import verdict_word
from attnscale.measure.statistics import STATISTICS, Place, in_place
from attnscale.models import load_bundled
from attnscale.plain import plain, readable
from attnscale.theory.limits import CRITICAL_MARGIN, critical_spread
from tests.real_models import anarcii, rxnfp

from .layers import codes, configured, layer_of, random_layer


def found(layer, trained=False):
    return [(finding.code, finding.severity) for finding in score_findings(layer, trained)]


def of_code(code, layer, trained=False, gradient_share=None):
    return [finding for finding in score_findings(layer, trained, gradient_share) if finding.code == code]


def verdicts(layer):
    return [head.verdict for head in head_verdicts(layer)]


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
    """Queries and keys are projected from normalised input."""
    x, layers = F.layer_norm(torch.randn(2, length, d_model), (d_model,)), []
    for _ in range(2):
        layers.append(torch.nn.Linear(d_model, d_model))
        initialise(layers[-1])
    query, key = (layer(x).detach().unflatten(-1, (heads, -1)).transpose(1, 2) for layer in layers)
    assert diagnose({"a": layer_of(query, key, causal=causal)}, trained=False).findings == []


@pytest.mark.parametrize(
    ("spread", "heads", "word"),
    [
        (0.1, ["diluted"] * 3, "diluted"),
        (1.0, ["healthy"] * 3, "healthy"),
        (5.0, ["sharp"] * 3, "sharp"),
        (torch.tensor([1.0, 30.0, 1.0]).view(3, 1, 1), ["healthy", "sharp", "healthy"], "sharp"),
        (torch.tensor([0.1, 1.0, 1.0]).view(3, 1, 1), ["diluted", "healthy", "healthy"], "healthy"),
    ],
)
def test_a_layer_has_the_word_of_its_heads(spread, heads, word):
    layer = random_layer(length=64, query_std=spread)
    assert verdicts(layer) == heads
    assert verdict_word(layer, []) == word
    for head, measured in zip(head_verdicts(layer), layer.stats.std_within_rows.tolist(), strict=True):
        assert (head.spread, head.keys) == (measured, 64)
        assert head.critical_spread == pytest.approx(math.sqrt(2 * math.log(64)))


def test_one_visible_key_is_healthy():
    layer = layer_of(torch.randn(3, 2, 5, 7), torch.randn(3, 2, 1, 7))
    assert (verdicts(layer), found(layer)) == (["healthy"] * 2, [])


def sampled(layer, rows):
    return replace(layer, stats=score_stats(layer.query, layer.key, is_causal=layer.causal, rows=rows))


@pytest.mark.parametrize(("times", "verdict"), [(0.1, "diluted"), (1.0, "healthy"), (30.0, "sharp"), (None, "")])
def test_a_sample_judges_heads_but_those_within_their_error_of_a_limit(times, verdict):
    edge = CRITICAL_MARGIN * critical_spread(211)
    layer = layer_of((times or edge) * torch.randn(2, 3, 211, 16), torch.randn(2, 3, 211, 16))
    if verdict:
        assert set(verdicts(sampled(layer, 32))) == {verdict}
        return
    assert (verdict_word(sampled(layer, 8), []), found(sampled(layer, 8))) == ("uncertain", [])
    assert "uncertain" not in verdicts(layer)


def test_sampled_rows_tell_the_keys_that_all_rows_see():
    layer = layer_of(*(torch.randn(1, 3, 257, 11) for _ in range(2)), causal=True)
    assert layer.stats.keys.tolist() == pytest.approx([129.0] * 3)
    samples = [sampled(layer, 31) for _ in range(100)]
    on_average = torch.stack([sample.stats.keys for sample in samples]).mean(0)
    assert on_average.tolist() == pytest.approx([129.0] * 3, rel=0.02)  # though the first rows are all measured


ONE_SHARP = torch.tensor([1.0, 30.0, 1.0]).view(3, 1, 1)


def test_a_sharp_head_is_a_warning_at_initialisation_that_begins_with_the_cause():
    (finding,) = of_code("sharp", random_layer(heads=3, length=64, query_std=ONE_SHARP))
    assert (finding.head, finding.severity) == (1, "warning")
    assert finding.message.startswith("The norms are large: ")


def test_a_layer_that_passes_no_gradient_is_an_error_at_initialisation_alone():
    layer = random_layer(length=32, query_std=100.0)
    (finding,) = of_code("sharp", layer)
    assert (finding.head, finding.severity) == (None, "error")
    assert "All heads are sharp: scores spread by " in finding.message
    notes = of_code("sharp", layer, trained=True)
    assert [(each.head, each.severity) for each in notes] == [(0, "note"), (1, "note"), (2, "note")]
    assert all(each.advice.startswith("A backward pass shows") for each in notes)


@pytest.mark.parametrize(("reached", "severity"), [(1e-5, "warning"), (0.5, "note"), (30.0, "note")])
def test_a_sharp_head_of_a_trained_model_is_judged_by_the_gradient_that_reached_it(reached, severity):
    layer = random_layer(heads=3, length=64, query_std=ONE_SHARP)
    (finding,) = of_code("sharp", layer, True, torch.tensor([1.0, reached, 1.0]))
    assert (finding.head, finding.severity) == (1, severity)
    assert ("hardly learns" in finding.advice) == (severity == "warning")


@pytest.mark.parametrize(("keys", "expected"), [(2, 0), (3, 0), (5, 1), (64, 1)])
def test_two_or_three_keys_cannot_tell_a_sharp_layer(keys, expected):
    assert len(of_code("sharp", layer_of(30 * torch.randn(2, 3, 8, 11), torch.randn(2, 3, keys, 11)))) == expected


def test_a_softmax_over_another_axis_has_no_sharp_rows():
    assert of_code("sharp", random_layer(length=32, query_std=30.0, mixes_along_softmax=False)) == []


def test_a_wrong_multiplier_is_the_cause_of_dilution():
    layer = random_layer(head_dim=64, scale=1 / 64)
    (finding,) = score_findings(layer, trained=False)
    assert (finding.code, finding.severity, finding.head) == ("diluted", "warning", None)
    assert "0.125" in finding.advice
    assert found(layer, trained=True) == [("diluted", "note")]
    assert found(random_layer(head_dim=64, scale=1 / 64, declared=configured(1 / 64))) == []


@given(std=st.floats(0.001, 0.4))
def test_small_weights_are_not_the_cause_of_dilution(std):
    assert found(random_layer(length=9, batch=1, query_std=std, key_std=std)) == []


def test_cosines_without_a_temperature_are_diluted_and_alike_tokens_are_not():
    query, key = (F.normalize(torch.randn(3, 2, 31, 64), dim=-1) for _ in range(2))
    assert found(layer_of(query, key, 1.0, normalised=True)) == [("diluted", "warning")]
    assert found(layer_of(query, key, 10.0, normalised=True)) == []
    alike = query[:, :, :1].expand(3, 2, 31, 64)
    assert found(layer_of(alike, alike, 10.0, normalised=True)) == []


@pytest.mark.parametrize(
    ("largest", "severity"), [(99.0, None), (150.0, "note"), (2e3, "warning"), (9e3, "warning"), (2e4, "error")]
)
def test_the_largest_score_is_held_to_what_was_published(largest, severity):
    query, key = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 5, 4)
    query[..., 0], key[0, 0, 2, 0] = 1.0, largest
    findings = of_code("exploding", layer_of(query, key, 1.0), True)
    assert [finding.severity for finding in findings] == ([] if severity is None else [severity])
    assert all(finding.measured == pytest.approx(largest) for finding in findings)
    assert all("above the mean" not in finding.message for finding in findings)


def shifted_by(shift, spread=1.0):
    """Scores of this spread, every row of which is shifted as a whole: a large query times what all keys share."""
    query, key = torch.randn(2, 3, 23, 11), spread * torch.randn(2, 3, 23, 11)
    query[..., 0], key[..., 0] = shift, 1.0
    return layer_of(query, key, 1.0)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    ("shift", "spread", "severity"), [(1.5e2, 1.0, "note"), (8e4, 1.0, "note"), (2e4, 200.0, "warning")]
)
def test_a_shift_of_whole_rows_is_a_note_and_hides_nothing(shift, spread, severity, trained):
    (finding,) = of_code("exploding", shifted_by(shift, spread), trained)
    assert finding.severity == severity
    assert finding.measured == pytest.approx(shift, rel=0.2)
    assert "above the mean of its row" in finding.message


def test_a_shift_does_not_sharpen():
    query, key = 4 * torch.randn(3, 2, 61, 16), 0.1 * torch.randn(3, 2, 61, 16)
    key[..., 0] += 40.0
    layer = layer_of(query, key)
    assert float(layer.stats.std.min()) > 10
    assert [head.spread for head in head_verdicts(layer)] == pytest.approx([0.4, 0.4], rel=0.05)
    assert (verdicts(layer), found(layer)) == (["healthy"] * 2, [("exploding", "note")])


def test_rows_far_below_zero_are_no_explosion():
    query, key = torch.randn(1, 3, 5, 11), torch.randn(1, 3, 2000, 11)
    slopes = -torch.arange(2000.0).flip(0).expand(1, 1, 5, -1)  # as ALiBi's: none above zero
    stats = score_stats(query, key, attn_mask=slopes)
    assert float(stats.max_above_mean.max()) > 900
    assert of_code("exploding", replace(layer_of(query, key), stats=stats)) == []


def test_a_published_model_whose_rows_are_shifted_by_ten_thousands_is_not_accused_of_it():
    model, inputs = anarcii()
    findings = audit(model, *inputs).findings
    crossed = [each for each in findings if "encoder_attention" in each.layer and each.code == "exploding"]
    assert [each.severity for each in crossed] == ["note", "note"]
    assert max(each.measured for each in crossed) == pytest.approx(7.9e4, rel=0.05)
    assert {each.code for each in findings if each.severity == "warning"} == {"exploding"}  # 7,300, and no shift


def test_a_sampled_maximum_is_bracketed():
    layer = sampled(random_layer(length=200, query_std=100.0), 8)
    (finding,) = of_code("exploding", layer)
    assert f"at most {readable(float(layer.stats.max_bound.max()), 4)} in all" in finding.message


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_scores_are_the_only_error_of_their_layer(value):
    query = torch.randn(1, 2, 5, 7)
    query[0, 1, 2, 3] = value
    findings = diagnose({"a": layer_of(query, torch.randn(1, 2, 6, 7), 1.0)}, trained=True).findings
    assert codes(findings) == ["non_finite"]
    assert (findings[0].severity, findings[0].message[:14]) == ("error", "1 of 2 heads h")


def test_sharp_heads_of_a_healthy_published_model_are_notes_unlike_dead_heads():
    model, tokens = rxnfp()
    assert {finding.severity for finding in audit(model, tokens).findings} == {"note"}
    found = audit(model, tokens, loss=lambda out: out.pooler_output.square().mean())
    shares = gradient_shares(found.layers)
    sharp = [float(shares[each.layer][each.head]) for each in found.findings if each.code == "sharp"]
    assert {finding.severity for finding in found.findings} == {"note"}
    assert len(sharp) == 11
    assert min(sharp) == pytest.approx(0.0155, rel=0.1)  # of the median head's: far above where one is dead
    assert max(sharp) == pytest.approx(0.67, rel=0.1)
    assert min(sharp) > 10 * UNREACHED


def test_every_head_of_the_bundled_model_gets_its_share_of_the_gradient():
    model, tokens = load_bundled()
    found = audit(model, tokens, loss=lambda out: F.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
    shares = torch.cat(list(gradient_shares(found.layers).values()))
    assert float(shares.median()) == pytest.approx(1.0)
    assert float(shares.min()) == pytest.approx(0.91, rel=0.05)


def watched(length, rows):
    model, x = attnscale.MultiheadAttention(24, 2, batch_first=True), torch.randn(2, length, 24)
    with torch.no_grad(), attnscale.watch(model, rows=rows) as seen:
        model(x, x, x)
    (layer,) = seen.layers.values()
    return layer, str(seen)


def test_standard_errors_stand_beside_sampled_numbers_alone():
    layer, table = watched(400, rows=None)
    assert ("stderr" in layer.stats.to_dict(), "±" in table) == (False, False)
    layer, table = watched(400, rows=200)
    for entry in in_place(Place.SEEN):
        errors = layer.stats.stderr(entry.attribute)
        assert layer.stats.to_dict()["stderr"][entry.attribute] == plain(errors.tolist())
        assert entry.error(layer.stats) == pytest.approx(errors.mean().item())
        assert f"{entry.factor * entry.whole(layer.stats):.3g}±{entry.factor * errors.mean().item():.1g}" in table
    assert math.isnan(STATISTICS["max"].error(layer.stats))


def test_an_error_that_rows_cannot_tell_is_a_question_mark_and_no_verdict():
    layer, table = watched(53, rows=8)
    assert layer.stats.stderr("std_within_rows").isnan().all()
    assert "±?" in table
    assert set(verdicts(layer)) == {"uncertain"}
