import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from attnscale import audit, score_stats
from attnscale.diagnose import CODES, SEVERITIES, Finding, diagnose
from attnscale.errors import InputError, SettingError

from .layers import random_layer


class Attention(nn.Module):
    def __init__(self, d_model, heads, scale=None):
        super().__init__()
        self.heads, self.multiplier = heads, scale
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x, is_causal=False):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=self.multiplier)
            .transpose(1, 2)
            .flatten(2)
        )


class Stack(nn.Module):
    """Residual attention blocks, the scale of each as given."""

    def __init__(self, *scales, d_model=66, heads=3):
        super().__init__()
        self.blocks = nn.ModuleList(Attention(d_model, heads, scale) for scale in scales)
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in scales)

    def forward(self, x, is_causal=False):
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x), is_causal=is_causal)
        return x


def test_a_correct_model_gets_nothing():
    found = audit(Stack(None, None), torch.randn(2, 19, 66), is_causal=True)
    assert found.findings == []
    assert found.worst is None
    assert not found.trained
    assert list(found.layers) == ["blocks.0", "blocks.1"]
    assert found.words == {"blocks.0": "healthy", "blocks.1": "healthy"}
    assert str(found).splitlines()[-1] == "Nothing found in 2 attention layers."
    assert [line.split()[0] for line in str(found).splitlines()[:3]] == ["layer", "blocks.0", "blocks.1"]


def test_findings_come_worst_first_then_by_layer():
    found = audit(Stack(None, 0.3, 1.0, 66**-0.5), torch.randn(2, 19, 66))
    places = [(finding.severity, finding.layer, finding.code) for finding in found.findings]
    assert places[:2] == [("error", "blocks.2", "unscaled"), ("error", "blocks.3", "scaled_by_model_dim")]
    assert ("warning", "blocks.1", "unusual_scale") in places[2:]
    assert all(layer != "blocks.0" for _, layer, _ in places)
    assert found.worst == "error"
    table, told = str(found).split("\n\n")
    assert len(table.splitlines()) == 1 + 4
    assert told.splitlines()[0].startswith("error: blocks.2: unscaled: ")
    assert len(told.splitlines()) == len(found.findings)


def test_an_audit_leaves_the_model_as_it_was():
    model, x = Stack(None), torch.randn(2, 7, 66)
    before = model(x)
    audit(model, x)
    assert torch.equal(model(x), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_if_of_a_layer_that_was_not_seen_says_which_were():
    with pytest.raises(SettingError, match=r"Expected one of: blocks\.0"):
        audit(Stack(None), torch.randn(2, 7, 66)).what_if("blocks.1")


def test_an_audit_is_json():
    text = json.dumps(audit(Stack(1.0), torch.randn(2, 19, 66)).to_dict())
    found = json.loads(text)
    assert found["worst"] == "error"
    assert found["layers"]["blocks.0"]["head_dim"] == 22
    assert {finding["code"] for finding in found["findings"]} <= set(CODES)


@pytest.mark.parametrize(
    ("scale", "code"),
    [(1.0, "unscaled"), (1 / 16, "scaled_by_dim"), (48**-0.5, "scaled_by_model_dim"), (16**-0.5, None)],
)
def test_a_published_model_whose_scale_was_written_over(scale, code):
    config = transformers.LlamaConfig(
        hidden_size=48, num_hidden_layers=1, num_attention_heads=3, intermediate_size=32, vocab_size=29
    )
    model = transformers.LlamaModel(config)
    model.layers[0].self_attn.scaling = scale
    found = audit(model, input_ids=torch.randint(0, 29, (2, 17)))
    assert {finding.code for finding in found.findings} - {"diluted"} == ({code} if code else set())


@pytest.mark.parametrize("normalised", [False, True])
def test_a_layer_is_not_judged_by_rows_of_padding_alone(normalised):
    """A glance at a few rows of a padded batch may find no other."""
    layer = random_layer(normalised=normalised)
    nothing = score_stats(layer.query, layer.key, attn_mask=torch.tensor(False))
    assert diagnose({layer.name: replace(layer, stats=nothing)}, trained=False).findings == []


def test_a_finding_is_what_the_contract_says():
    finding = Finding("a.b", 3, "sharp", "note", "It is sharp.", 4.0, 2.0, "Look.")
    assert list(finding.to_dict()) == [
        "layer", "head", "code", "severity", "message", "measured", "expected", "advice",
    ]  # fmt: skip
    assert str(finding) == "note: a.b, head 3: sharp: It is sharp. Look."
    assert SEVERITIES == ("note", "warning", "error")
    assert set(CODES) >= {
        "unscaled", "scaled_by_dim", "scaled_by_model_dim", "unusual_scale", "config_mismatch", "scale_after_softmax",
        "softmax_wrong_axis", "weights_not_normalised", "softmax_twice", "dropout_before_softmax", "undefined_rows",
        "attends_to_future", "softcap_before_scale", "heads_mispaired", "no_gradient", "qk_norm_freezes",
        "inert_qk_norm", "inert_softcap", "inert_mask", "diluted", "sharp", "exploding", "non_finite",
    }  # fmt: skip


class ModeDependent(nn.Module):
    """Scaled in training, and not in evaluation; counts its calls in a buffer, and draws random numbers."""

    def __init__(self, in_training=None, in_evaluation=None):
        super().__init__()
        self.attention, self.scales = Attention(66, 3), (in_evaluation, in_training)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1  # another buffer
        torch.rand(1)
        self.attention.multiplier = self.scales[self.training]
        return self.attention(x)


@pytest.mark.parametrize("training", [True, False])
def test_a_scale_that_depends_on_the_mode_is_found_in_either(training):
    model = ModeDependent(None, 0.3).train(training)
    found = {finding.code: finding for finding in audit(model, torch.randn(2, 19, 66)).findings}
    numbers = found["scale_depends_on_mode"].measured, found["scale_depends_on_mode"].expected
    assert numbers == pytest.approx((0.3, 22**-0.5), rel=1e-3)
    assert found["unusual_scale"].message.startswith("In evaluation mode: " if training else "The scores")


def test_the_other_mode_leaves_nothing_behind():
    model, x = ModeDependent().train(), torch.randn(2, 19, 66)
    model.attention.eval()
    state = torch.random.get_rng_state()
    assert audit(model, x).findings == []
    assert model.calls == 1
    assert (model.training, model.attention.training) == (True, False)
    torch.rand(1), torch.random.get_rng_state()
    after = torch.random.get_rng_state()
    torch.random.set_rng_state(state)
    torch.rand(1), torch.rand(1)
    assert torch.equal(torch.random.get_rng_state(), after)  # one number was drawn by the audit, one since


def test_a_cache_among_the_inputs_grows_as_by_one_run():
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50
    )
    cache = transformers.DynamicCache()
    audit(transformers.LlamaForCausalLM(config).eval(), torch.arange(9)[None], past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 9


class OnlyInTraining(ModeDependent):
    def forward(self, x):
        if not self.training:
            raise ValueError("not trained yet")
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (lambda: OnlyInTraining().train(), torch.randn(2, 19, 66)),
        (lambda: Stack(None), torch.randn(2, 19, 66, requires_grad=True) * 2),  # of a graph: it cannot be copied
    ],
)
def test_a_mode_in_which_the_model_was_not_run_is_said(model, x):
    found = audit(model(), x)
    assert (found.findings, found.forward_passes) == ([], 1)
    (told,) = found.unchecked
    assert "evaluation mode" in told
    assert found.to_dict()["unchecked"] == [told]


def test_with_a_loss_the_gradient_that_reached_queries_and_keys_is_known_and_none_is_left():
    model, x = Stack(None, None), torch.randn(2, 19, 66)
    found = audit(model, x, loss=lambda out: out.square().mean())
    assert all(parameter.grad is None for parameter in model.parameters())
    for layer in found.layers.values():
        assert (layer.query_gradient > 0).all()
        assert (layer.key_gradient > 0).all()


@pytest.mark.parametrize("loss", [lambda out: out, lambda out: 1.0])
def test_a_loss_is_one_number(loss):
    with pytest.raises(InputError, match="one number"):
        audit(Stack(None), torch.randn(2, 19, 66), loss=loss)


def test_a_trained_sharp_head_is_a_note_until_no_gradient_reaches_it():
    model, x = Stack(None, None), torch.randn(2, 40, 66)
    with torch.no_grad():
        for norm in model.norms:
            norm.weight += 0.1 * torch.randn(66)  # trained
        for block in model.blocks:
            block.qkv.weight[:132] *= 3
        model.blocks[1].qkv.weight[:44] *= 1e6  # two heads of the second layer: one key takes all, exactly
    found = audit(model, x, loss=lambda out: out.square().mean())
    severities = {(each.layer, each.head): each.severity for each in found.findings if each.code == "sharp"}
    assert severities["blocks.1", 0] == severities["blocks.1", 1] == "warning"
    assert severities.get(("blocks.1", 2), "note") == "note"
    without = audit(model, x)
    assert {each.severity for each in without.findings if each.code == "sharp"} == {"note"}


def test_queries_computed_without_a_gradient_are_found_by_a_backward_pass():
    class Careless(Attention):
        def forward(self, x):
            with torch.no_grad():
                query = self.qkv(x)[..., :66]
            key, value = self.qkv(x)[..., 66:].chunk(2, -1)
            query, key, value = (t.unflatten(-1, (3, -1)).transpose(1, 2) for t in (query, key, value))
            return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))

    model, x = Careless(66, 3), torch.randn(2, 19, 66)
    assert audit(model, x).findings == []
    (finding,) = audit(model, x, loss=lambda output: output.square().mean()).findings
    assert (finding.code, finding.severity) == ("no_gradient", "warning")
    assert finding.message.startswith("A gradient reached the keys and not the queries")
