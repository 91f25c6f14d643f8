"""compare_backends: the attention implementations of one model, layer by layer."""

import json

import pytest
import torch
from torch import nn

import attnscale
from attnscale.errors import SettingError
from tests.cli import running
from tests.comparing import backends
from tests.comparing.backends import gemma2, gpt2, gpt_oss, llama, padded, tokens


def words(found, backend, layer):
    return [each.message for row in found.differing if (row.backend, row.layer) == (backend, layer)
            for each in row.differences]  # fmt: skip


@pytest.mark.parametrize("batch", [tokens, padded])
@pytest.mark.parametrize(
    ("make", "names"), [(llama, ("eager", "sdpa", "flex")), (gpt2, ("eager", "sdpa")), (gemma2, ("eager", "flex"))]
)
def test_correct_backends_agree(make, names, batch):
    found = attnscale.compare_backends(make(), batch(), names)
    assert found.backends == names
    assert found.differing == ()
    assert found.first is None
    assert len(found.rows) == 2 * len(names)
    assert max(row.output_change for row in found.rows) < 1e-5
    assert "agree" in found.conclusion


def test_a_scale_that_is_ignored_is_named_with_its_source():
    found = attnscale.compare_backends(gemma2(), tokens(), ("eager", "default_scale"))
    assert found.first.layer == "model.layers.0.self_attn"
    assert [each.what for each in found.first.differences] == ["scale"]
    assert found.first.scale == pytest.approx(14**-0.5, rel=1e-3)
    (message,) = words(found, "default_scale", "model.layers.0.self_attn")
    assert message.endswith("config.query_pre_attn_scalar asks for 0.2085: it ignores the scale")


def test_a_reference_that_ignores_the_scale_is_named_instead():
    found = attnscale.compare_backends(gemma2(), tokens(), ("default_scale", "eager"))
    assert "default_scale ignores the scale" in str(found.first)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_missing_causal_mask_and_visible_padding_are_different_findings(make):
    found = attnscale.compare_backends(make(), padded(), ("eager", "sdpa", "without_a_mask"))
    assert {row.backend for row in found.differing} == {"without_a_mask"}
    first = found.first.layer
    assert words(found, "without_a_mask", first) == [
        "it sees keys 0 to 2, that eager hides from every query: padding",
        "it sees later keys that eager hides, up to 12 ahead: the causal term is missing",
    ]
    assert found.conclusion == (
        f"without_a_mask differs from eager in 2 of 2 layers, first in {first} (visible keys); sdpa agrees."
    )


def test_a_window_of_one_key_more_is_a_difference_of_the_layer_with_the_window():
    found = attnscale.compare_backends(gemma2(), tokens(), ("without_a_softcap", "one_key_more"))
    assert [row.layer for row in found.differing] == ["model.layers.0.self_attn"]
    assert words(found, "one_key_more", "model.layers.0.self_attn") == [
        "it sees earlier keys that without_a_softcap hides: its window is 6, not 5"
    ]
    reversed_ = attnscale.compare_backends(gemma2(), tokens(), ("one_key_more", "without_a_softcap"))
    assert "it hides earlier keys that one_key_more shows: its window is 5, not 6" in str(reversed_.first)
    inherits = found.rows[-1]
    assert inherits.layer == "model.layers.1.self_attn"
    assert inherits.input_change > 1e-3


def test_a_window_that_is_ignored_and_a_softcap_that_is_not_applied():
    found = attnscale.compare_backends(gemma2(), tokens(), ("eager", "without_a_mask"))
    assert words(found, "without_a_mask", "model.layers.0.self_attn") == [
        "it applies no soft-cap, eager applies a soft-cap of 20",
        "it sees later keys that eager hides, up to 12 ahead: the causal term is missing",
        "it sees earlier keys that eager hides: its window is none, not 5",
    ]


@pytest.mark.parametrize("batch", [tokens, padded])
def test_sinks_that_are_not_passed_on_are_the_one_difference(batch):
    found = attnscale.compare_backends(gpt_oss(), batch(), ("eager", "without_a_softcap"))
    assert [[each.what for each in row.differences] for row in found.differing] == [["sinks"], ["sinks"]]
    assert words(found, "without_a_softcap", found.first.layer) == ["it has no sink beside the keys, eager has a sink"]
    assert len({row.keys for row in found.rows if row.layer == found.first.layer}) == 1


def test_an_output_that_differs_for_no_reason_of_the_scores_is_a_difference():
    found = attnscale.compare_backends(llama(), tokens(), ("eager", "other_values"))
    assert found.first.layer == "model.layers.0.self_attn"
    assert [each.what for each in found.first.differences] == ["output"]
    assert found.first.output_change == pytest.approx(0.1, rel=1e-3)


def test_backends_that_cannot_run_are_named_with_the_reason():
    found = attnscale.compare_backends(llama(), tokens(), ("eager", "flash", "broken", "sdpa"))
    assert found.backends == ("eager", "sdpa")
    assert set(found.unavailable) == {"flash", "broken"}
    assert "no kernel for this device" in found.unavailable["broken"]
    assert "flash did not run: " in str(found)
    alone = attnscale.compare_backends(gpt2(), tokens(), ("eager", "flex"))
    assert not alone.is_compared
    assert alone.conclusion == "Nothing was compared: only eager ran."
    assert "does not support" in alone.unavailable["flex"]


def test_the_model_is_left_as_it_was():
    model = llama().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attnscale.compare_backends(model, padded(), ("eager", "sdpa", "broken"))
    assert model.training
    assert model.model.layers[0].training
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_models_without_backends_are_refused_with_a_sentence():
    with pytest.raises(SettingError, match="Expected a transformers model"):
        attnscale.compare_backends(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(SettingError, match="two backends or more"):
        attnscale.compare_backends(llama(), tokens(), ("eager", "eager"))
    with pytest.raises(SettingError, match="several backends"):
        attnscale.compare_backends(llama(), tokens(), "eager,sdpa")


def test_a_notebook_and_a_data_frame_show_every_layer_of_every_backend():
    found = attnscale.compare_backends(llama(), tokens(), ("eager", "without_a_mask"))
    assert repr(found) == f"<BackendComparison: {found.conclusion.rstrip('.')}>"
    assert "the causal term is missing" in found._repr_html_()
    assert list(found.to_pandas()["backend"]) == ["eager", "without_a_mask"] * 2


MODEL = f"{backends.__name__}:llama"


def test_the_command_ends_with_zero_one_or_two(tmp_path):
    same = running.run("compare", MODEL, "--backends", "eager,sdpa", "--length", "13")
    assert (same.returncode, same.stderr) == (0, "")
    assert "sdpa agrees with eager in 2 layers" in " ".join(same.stdout.split())
    page = tmp_path / "backends.html"
    other = running.run("compare", MODEL, "--backends", "eager,without_a_mask,flash", "--html", page, "--json")
    found = json.loads(other.stdout)
    assert other.returncode == 1
    assert found["first"]["layer"] == "model.layers.0.self_attn"
    assert found["first"]["differences"][0]["what"] == "visible keys"
    assert list(found["unavailable"]) == ["flash"]
    assert "the causal term is missing" in page.read_text(encoding="utf-8")
    alone = running.run("compare", MODEL, "--backends", "eager,flash")
    assert alone.returncode == 2
    assert alone.stderr == "attnscale: No layer was compared, so the exit status is 2.\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("bundled", "--backends", "eager,sdpa"), "Expected a transformers model"),
        ((MODEL, "--backends", "eager"), "Expected two backends or more"),
        ((MODEL,), "Expected two models to compare, or one and --backends"),
        ((MODEL, MODEL, "--backends", "eager,sdpa"), "Expected two models to compare, or one and --backends"),
    ],
)
def test_bad_usage_is_one_sentence(arguments, sentence):
    result = running.run("compare", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1
