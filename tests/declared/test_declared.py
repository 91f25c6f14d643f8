import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attnscale import MultiheadAttention
from attnscale.declared import Authority, declared
from attnscale.declared.configuration import QK_NORM_FLAGS

TINY = dict(
    hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, vocab_size=29,
    max_position_embeddings=64,
)  # fmt: skip


class Module(nn.Module):
    """A module with whatever attributes it is given."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


class Attention(Module):
    pass


def said(head_dim=16, /, **attributes):
    return declared(Module(attn=Attention(**attributes)), "attn", head_dim)


def configured(head_dim=16, /, **fields):
    return declared(Module(attn=Attention(), config=SimpleNamespace(**fields)), "attn", head_dim)


# Attributes


@given(head_dim=st.integers(2, 256), power=st.sampled_from([-0.5, 0.5, -0.25, 0.25]))
def test_a_root_of_the_dimension_restates_the_usual_scale(head_dim, power):
    found = said(head_dim, scale=head_dim**power)
    assert found.scale == head_dim**-0.5
    assert found.scale_readings == (head_dim**-0.5,)
    assert found.scale_source == "attn.scale"


ONE_ELEMENT = (torch.tensor([4.0]), torch.tensor(0.25), nn.Parameter(torch.full((1,), 0.25)))
NAMES = ("scaling", "softmax_scale", "norm_factor", "inv_norm_factor", "temperature")


@pytest.mark.parametrize("attributes", [*({name: 4.0} for name in NAMES), *({"scale": each} for each in ONE_ELEMENT)])
def test_the_usual_names_are_read_as_numbers_or_tensors_of_one(attributes):
    assert said(16, **attributes).scale == 0.25


@pytest.mark.parametrize("value", [None, True, 1.0, 0.0, -0.25, math.nan, "sum", torch.ones(3), nn.Linear(2, 2)])
def test_a_value_that_cannot_be_a_scale_declares_nothing(value):
    found = said(16, scale=value)
    assert (found.scale, found.scale_authority) == (None, Authority.NONE)


def test_a_number_of_its_own_may_multiply_or_divide():
    assert set(said(16, scale=0.1).scale_readings) >= {0.1, 10.0}
    assert any(math.isclose(reading, 0.25 * 1.3) for reading in said(16, scale=0.25, temperature=1.3).scale_readings)
    assert said(16, scale=10.0).scale == said(16, scale=0.1).scale == 0.1


class ScalesTheQuery(Attention):
    def forward(self, query, key, value):
        return (query * self.scale @ key.mT).softmax(-1) @ value


class PassesItOn(Attention):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale)


class DividesTheScores(Attention):
    def forward(self, q, k, v):
        scores = torch.matmul(q, k.transpose(-2, -1))
        scores /= self.scale
        return scores.softmax(-1) @ v


class ScalesTheBranch(Attention):
    def forward(self, x, q, k, v):
        return x + self.scale * F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("kind", [ScalesTheQuery, PassesItOn, DividesTheScores, ScalesTheBranch, Attention])
def test_the_code_tells_whether_a_number_is_the_scale(kind):
    is_scale = kind not in (ScalesTheBranch, Attention)
    assert declared(kind(scale=0.1), "", 16).scale_authority is (Authority.NAMED if is_scale else Authority.ATTRIBUTE)
    assert declared(kind(softmax_scale=0.1), "", 16).scale_authority is Authority.NAMED


def test_only_what_calls_itself_attention_is_read_upwards():
    inner = Attention()
    assert declared(Module(attn=Module(attn=inner), scale=0.1), "attn.attn", 16).scale is None
    assert declared(Module(attn=Attention(scale=0.25, inner=inner)), "attn.inner", 16).scale == 0.25
    assert declared(Module(attn=Attention(scale=0.25)), "attn.nowhere", 16).scale_source == "attn.scale"


# Rules of this library


@pytest.mark.parametrize(
    ("rule", "scale"),
    [("unscaled", 1.0), ("inverse_dim", 1 / 16), ("mup", 0.5), (0.3, 0.3), ("log_length", None), ("QKNorm", None)],
)
def test_a_rule_is_a_choice(rule, scale):
    found = declared(MultiheadAttention(32, 2, scale=rule), "", 16)
    assert found.scale == scale
    assert found.scale_authority is Authority.CONFIGURED


# Configurations


@pytest.mark.parametrize(
    ("fields", "scale", "source"),
    [
        (dict(query_pre_attn_scalar=144), 1 / 12, "config.query_pre_attn_scalar"),
        (dict(attention_multiplier=0.0078125), 0.0078125, "config.attention_multiplier"),
        (dict(softmax_scale=0.3), 0.3, "config.softmax_scale"),
        (dict(attn_config=SimpleNamespace(softmax_scale=0.2)), 0.2, "config.attn_config.softmax_scale"),
        (dict(attn_config=dict(softmax_scale=0.2)), 0.2, "config.attn_config.softmax_scale"),
        (dict(attn_config=dict(softmax_scale=None)), None, ""),
        (dict(scale_attn_weights=False), 1.0, "config.scale_attn_weights"),
        (dict(scale_attn_weights=True), 0.25, "config.scale_attn_weights"),
        (dict(key_multiplier=0.5), 0.125, "config.key_multiplier"),
        (dict(hidden_size=32, residual_multiplier=0.2, logit_scale=2.0), None, ""),
    ],
)
def test_fields_that_set_the_scale(fields, scale, source):
    found = configured(16, **fields)
    assert found.scale == (None if scale is None else pytest.approx(scale))
    assert found.scale_source == source
    assert found.scale_authority is (Authority.NONE if scale is None else Authority.CONFIGURED)


def test_a_scale_that_falls_with_depth_knows_its_layer():
    config = SimpleNamespace(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=True)
    model = Module(attn=Attention(), config=config)
    stack = nn.ModuleDict({"h": nn.ModuleList([nn.Identity(), nn.Identity(), model])})
    assert declared(stack, "h.2.attn", 16).scale == pytest.approx(0.25 / 3)


@pytest.mark.parametrize(
    ("read", "fields", "source"),
    [
        (configured, {"attn_logit_softcapping": 50.0}, "config.attn_logit_softcapping"),
        (configured, {"attention_logit_cap": 50.0}, "config.attention_logit_cap"),
        (configured, {"attn_softcap": 50.0}, "config.attn_softcap"),
        (configured, {"attn_logit_cap": 50.0}, "config.attn_logit_cap"),
        (configured, {"final_logit_softcapping": 50.0}, ""),  # these cap something else
        (configured, {"moe_router_logit_softcapping": 50.0}, ""),
        (configured, {"logit_cap": 50.0}, ""),
        (said, {"logit_softcap": 50.0}, "attn.logit_softcap"),
        (said, {"softcap": 0.0}, ""),
    ],
)
def test_fields_that_cap_the_scores(read, fields, source):
    found = read(16, **fields)
    assert (found.softcap, found.softcap_source) == (50.0 if source else None, source)


@pytest.mark.parametrize("value", [False, None, "qwen3", nn.LayerNorm(4)])
def test_a_value_that_is_no_flag_requests_no_norm(value):
    assert not configured(16, use_qk_norm=value).qk_norm
    assert not said(16, qk_norm=value).qk_norm


@pytest.mark.parametrize("flag", QK_NORM_FLAGS)
@pytest.mark.parametrize(("read", "source"), [(configured, "config"), (said, "attn")])
def test_a_norm_is_turned_on_by_the_same_flags_in_a_configuration_and_in_a_module(read, source, flag):
    found = read(16, **{flag: True})
    assert (found.qk_norm, found.qk_norm_source) == (True, f"{source}.{flag}")


def test_the_nearest_configuration_wins():
    inner, config = Module(attn=Attention(), config={"softmax_scale": 0.1}), SimpleNamespace(softmax_scale=0.2)
    assert declared(Module(attn=inner, config=config), "attn.attn", 16).scale == 0.1
    silent = Attention(rotary=SimpleNamespace(base=1e4), args=Arguments(), hook=lambda: None, table=torch.zeros(3))
    assert declared(Module(attn=silent, config=config), "attn", 16).scale == 0.2


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_stretched_rotary_embedding_may_scale_the_scores(name):
    found = configured(16, **{name: {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 0.7}})
    assert found.scale is None
    assert found.scale_readings == pytest.approx((0.25 * (0.07 * math.log(40) + 1) ** 2,))
    assert configured(16, **{name: {"rope_type": "linear", "factor": 4.0}}).scale_readings == ()


def test_a_model_that_says_nothing_declares_nothing():
    found = declared(nn.TransformerEncoderLayer(32, 2), "self_attn", 16)
    assert (found.scale, found.softcap, found.qk_norm, found.scale_readings) == (None, None, False, ())


# Real architectures: what their configurations declare is what their code multiplies by


@pytest.mark.parametrize(
    ("name", "fields", "path", "scale"),
    [
        ("Llama", {}, "layers.0.self_attn", 12**-0.5),
        ("GPT2", {}, "h.1.attn", 12**-0.5),
        ("GPT2", {"scale_attn_by_inverse_layer_idx": True}, "h.1.attn", 12**-0.5 / 2),
        ("GPT2", {"scale_attn_weights": False}, "h.1.attn", 1.0),
        ("Gemma2", {"query_pre_attn_scalar": 20, "head_dim": 12}, "layers.0.self_attn", 20**-0.5),
        ("Granite", {"attention_multiplier": 0.07}, "layers.1.self_attn", 0.07),
    ],
)
def test_configured_architectures(name, fields, path, scale):
    kind = getattr(transformers, f"{name}Model")
    model = kind(kind.config_class(**TINY, **fields))
    found = declared(model, path, 12)
    assert found.scale == pytest.approx(scale)
    own = getattr(model.get_submodule(path), "scaling", None)
    assert own is None or own == pytest.approx(scale)


def test_a_scale_written_over_in_a_published_module_is_no_design():
    model = transformers.LlamaModel(transformers.LlamaConfig(**TINY))
    model.layers[0].self_attn.scaling = 1 / 12
    assert declared(model, "layers.0.self_attn", 12).scale_authority is Authority.NAMED
    model.layers[0].self_attn.scaling = 1.0
    assert declared(model, "layers.0.self_attn", 12).scale is None


# Configurations under any name


@dataclasses.dataclass
class Arguments:
    attention_scores_scalar: float | None = None
    attention_logit_softcapping: float | None = None
    qk_norm: bool = False


@pytest.mark.parametrize("name", ["config", "args", "params", "cfg", "_options"])
@pytest.mark.parametrize("make", [Arguments, SimpleNamespace, dict])
def test_a_configuration_is_read_from_any_attribute(name, make):
    found = said(16, **{name: make(attention_scores_scalar=144.0, attention_logit_softcapping=50.0)})
    assert (found.scale, found.scale_source) == (1 / 12, f"{name}.attention_scores_scalar")
    assert found.scale_authority is Authority.CONFIGURED
    assert (found.softcap, found.softcap_source) == (50.0, f"{name}.attention_logit_softcapping")
    assert said(16, **{name: make(qk_norm=True)}).qk_norm_source == f"{name}.qk_norm"
