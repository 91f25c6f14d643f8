import json
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from attnscale import audit
from attnscale.diagnose import CODES, SEVERITIES, Finding
from attnscale.errors import SettingError


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
    assert {verdict.verdict for verdict in found.verdicts.values()} == {"healthy"}
    assert str(found) == "Nothing found in 2 attention layers."


def test_findings_come_worst_first_then_by_layer():
    found = audit(Stack(None, 0.3, 1.0, 66**-0.5), torch.randn(2, 19, 66))
    places = [(finding.severity, finding.layer, finding.code) for finding in found.findings]
    assert places[:2] == [("error", "blocks.2", "unscaled"), ("error", "blocks.3", "scaled_by_model_dim")]
    assert ("warning", "blocks.1", "unusual_scale") in places[2:]
    assert all(layer != "blocks.0" for _, layer, _ in places)
    assert found.worst == "error"
    assert str(found).splitlines()[0].startswith("error: blocks.2: unscaled: ")
    assert len(str(found).splitlines()) == len(found.findings)


def test_an_audit_leaves_the_model_as_it_was():
    model, x = Stack(None), torch.randn(2, 7, 66)
    before = model(x)
    audit(model, x)
    assert torch.equal(model(x), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_if_tries_rules_on_what_was_seen():
    found = audit(Stack(1.0), torch.randn(1, 19, 66), is_causal=True)
    table = found.what_if("blocks.0")
    assert table["current"].scale == pytest.approx(1.0, rel=1e-3)
    assert table["current"].spread == pytest.approx(
        float(found.layers["blocks.0"].stats.std_within_rows.mean()), rel=1e-3
    )
    assert table["inverse_sqrt"].spread == pytest.approx(table["current"].spread / math.sqrt(22), rel=1e-3)


def test_what_if_of_a_layer_that_was_not_seen_says_which_were():
    with pytest.raises(SettingError, match=r"Expected one of: blocks\.0"):
        audit(Stack(None), torch.randn(2, 7, 66)).what_if("blocks.1")


def test_an_audit_is_json():
    text = json.dumps(audit(Stack(1.0), torch.randn(2, 19, 66)).to_dict())
    found = json.loads(text)
    assert found["worst"] == "error"
    assert found["layers"]["blocks.0"]["head_dim"] == 22
    assert {finding["code"] for finding in found["findings"]} <= set(CODES)


def test_weights_that_are_not_numbers_are_found():
    model = Stack(None)
    with torch.no_grad():
        model.blocks[0].qkv.weight[3, 3] = math.nan
    found = audit(model, torch.randn(2, 19, 66))
    assert [(finding.code, finding.severity) for finding in found.findings] == [("non_finite", "error")]


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


def test_a_finding_is_what_the_contract_says():
    finding = Finding("a.b", 3, "saturated", "note", "It is sharp.", 4.0, 2.0, "Look.")
    assert list(finding.to_dict()) == [
        "layer", "head", "code", "severity", "message", "measured", "expected", "advice",
    ]  # fmt: skip
    assert str(finding) == "note: a.b, head 3: saturated: It is sharp. Look."
    assert SEVERITIES == ("note", "warning", "error")
    assert set(CODES) == {
        "unscaled", "scaled_by_dim", "scaled_by_model_dim", "unusual_scale", "config_mismatch", "scale_after_softmax",
        "softmax_wrong_axis", "inert_qk_norm", "inert_softcap", "diluted", "saturated", "exploding", "non_finite",
    }  # fmt: skip
