import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from attnscale import audit, score_stats
from attnscale.diagnose import CODES, SEVERITIES, Finding, diagnose
from attnscale.errors import InputError
from tests.zoo.entry import SelfAttention

from .layers import random_layer

WIDTH, HEADS = 66, 3


class Attention(SelfAttention):
    def __init__(self, scale=None):
        super().__init__(WIDTH, HEADS)
        self.multiplier = scale

    def forward(self, x, is_causal=False):
        return self.merge(F.scaled_dot_product_attention(*self.project(x), is_causal=is_causal, scale=self.multiplier))


class Stack(nn.Module):
    """Residual attention blocks, the scale of each as given."""

    def __init__(self, *scales):
        super().__init__()
        self.blocks = nn.ModuleList(map(Attention, scales))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in scales)

    def forward(self, x, is_causal=False):
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x), is_causal=is_causal)
        return x


def batch(length=19, **options):
    return torch.randn(2, length, WIDTH, **options)


def test_a_correct_model_gets_nothing_and_is_left_as_it_was():
    model, x = Stack(None, None), batch()
    before = model(x, is_causal=True)
    found = audit(model, x, is_causal=True)
    assert (found.findings, found.worst, found.trained) == ([], None, False)
    assert found.words == {"blocks.0": "healthy", "blocks.1": "healthy"}
    assert str(found).splitlines()[-1] == "Nothing found in 2 attention layers."
    assert [line.split()[0] for line in str(found).splitlines()[:3]] == ["layer", "blocks.0", "blocks.1"]
    assert torch.equal(model(x, is_causal=True), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_findings_come_worst_first_then_by_layer_in_text_and_json():
    found = audit(Stack(None, 0.3, 1.0, WIDTH**-0.5), batch())
    places = [(finding.severity, finding.layer, finding.code) for finding in found.findings]
    assert places[:2] == [("error", "blocks.2", "unscaled"), ("error", "blocks.3", "scaled_by_model_dim")]
    assert ("warning", "blocks.1", "unusual_scale") in places[2:]
    assert all(layer != "blocks.0" for _, layer, _ in places)
    table, told = str(found).split("\n\n")
    assert len(table.splitlines()) == 1 + 4
    assert told.splitlines()[0].startswith("error: blocks.2: unscaled: ")
    assert len(told.splitlines()) == len(found.findings)
    plain = json.loads(json.dumps(found.to_dict()))
    assert (plain["worst"], plain["layers"]["blocks.0"]["head_dim"]) == ("error", 22)
    assert {finding["code"] for finding in plain["findings"]} <= set(CODES)


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
        self.attention, self.scales = Attention(), (in_evaluation, in_training)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1  # another buffer
        torch.rand(1)
        self.attention.multiplier = self.scales[self.training]
        return self.attention(x)


@pytest.mark.parametrize("training", [True, False])
def test_a_scale_that_depends_on_the_mode_is_found_in_either(training):
    found = {each.code: each for each in audit(ModeDependent(None, 0.3).train(training), batch()).findings}
    numbers = found["scale_depends_on_mode"].measured, found["scale_depends_on_mode"].expected
    assert numbers == pytest.approx((0.3, 22**-0.5), rel=1e-3)
    assert found["unusual_scale"].message.startswith("In evaluation mode: " if training else "The scores")


def test_the_other_mode_leaves_nothing_behind():
    model, x = ModeDependent().train(), batch()
    model.attention.eval()
    torch.manual_seed(5)
    assert audit(model, x).findings == []
    assert model.calls == 1
    assert (model.training, model.attention.training) == (True, False)
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.rand(2)[1] == after  # the audit drew one number


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
    ("kind", "x"),
    [
        (OnlyInTraining, batch()),
        (lambda: Stack(None), batch(requires_grad=True) * 2),  # of a graph: it cannot be copied
    ],
)
def test_an_audit_says_in_which_mode_it_could_not_run_the_model(kind, x):
    found = audit(kind(), x)
    assert (found.findings, found.forward_passes) == ([], 1)
    (told,) = found.unchecked
    assert "evaluation mode" in told
    assert found.to_dict()["unchecked"] == [told]


def square(output):
    return output.square().mean()


def test_with_a_loss_the_gradient_that_reached_queries_and_keys_is_known_and_none_is_left():
    model = Stack(None, None)
    found = audit(model, batch(), loss=square)
    assert all(parameter.grad is None for parameter in model.parameters())
    for layer in found.layers.values():
        assert (layer.query_gradient > 0).all()
        assert (layer.key_gradient > 0).all()
    for wrong in (lambda out: out, lambda out: 1.0):
        with pytest.raises(InputError, match="one number"):
            audit(model, batch(), loss=wrong)


def test_a_trained_sharp_head_is_a_note_until_no_gradient_reaches_it():
    model, x = Stack(None, None), batch(40)
    with torch.no_grad():
        for norm in model.norms:
            norm.weight += 0.1 * torch.randn(WIDTH)  # trained
        for block in model.blocks:
            block.q_proj.weight *= 3
            block.k_proj.weight *= 3
        model.blocks[1].q_proj.weight[:44] *= 1e6  # two heads of the second layer: one key takes all, exactly
    found = audit(model, x, loss=square)
    severities = {(each.layer, each.head): each.severity for each in found.findings if each.code == "sharp"}
    assert severities["blocks.1", 0] == severities["blocks.1", 1] == "warning"
    assert severities.get(("blocks.1", 2), "note") == "note"
    assert {each.severity for each in audit(model, x).findings if each.code == "sharp"} == {"note"}


class NoGradientInQueries(Attention):
    def project(self, x):
        with torch.no_grad():
            query, _, _ = super().project(x)
        return query, *super().project(x)[1:]


def test_queries_computed_without_a_gradient_are_found_by_a_backward_pass():
    model, x = NoGradientInQueries(), batch()
    assert audit(model, x).findings == []
    (finding,) = audit(model, x, loss=square).findings
    assert (finding.code, finding.severity) == ("no_gradient", "warning")
    assert finding.message.startswith("A gradient reached the keys and not the queries")
