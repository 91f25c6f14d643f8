"""Every rule of the catalogue against its formula in NumPy, and the few things only one of them promises."""

import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from attnscale import attention, rules
from attnscale.errors import SettingError, ShapeError, UnknownRuleError
from attnscale.rules import RULES, get_rule

from .oracle import EXAMPLES

batch, heads, q_len, kv_len, head_dim = 2, 3, 5, 7, 11
LEARNED = [name for name, rule in RULES.items() if isinstance(rule, type) and issubclass(rule, nn.Module)]


def tensors(dtype=torch.float64, kv_heads=heads):
    query = torch.randn(batch, heads, q_len, head_dim, dtype=dtype) + 0.3
    key = torch.randn(batch, kv_heads, kv_len, head_dim, dtype=dtype) * 1.5 - 0.2
    return query, key


def scores(scaled):
    query, key, scale = scaled
    if key.dim() > 2:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    return (query.double() @ key.double().mT * scale).detach().numpy()


def test_every_rule_has_an_oracle_and_a_catalogue_entry():
    assert EXAMPLES.keys() == RULES.keys()
    assert all(name in rules.__all__ for name in RULES)
    assert all(rules.about_rule(rule) for rule in RULES.values())


@pytest.mark.parametrize("kv_heads", [heads, 1])
@pytest.mark.parametrize("name", RULES)
def test_scores_are_those_of_the_formula(name, kv_heads):
    query, key = tensors(kv_heads=kv_heads)
    rule = EXAMPLES[name].make(heads, kv_heads, head_dim)
    visible = torch.arange(1, q_len + 1)
    expected = EXAMPLES[name].scores(
        rule, query.numpy(), key.numpy().repeat(heads // kv_heads, axis=1), visible.numpy()[:, None]
    )
    np.testing.assert_allclose(scores(rule(query, key, visible)), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_a_constant_rule_leaves_tensors_alone_and_every_rule_keeps_dtype_and_shape(name):
    query, key = tensors(torch.bfloat16)
    rule = EXAMPLES[name].make(heads, heads, head_dim)
    new_query, new_key, scale = rule(query, key)
    assert (new_query.dtype, new_query.shape, new_key.dtype) == (query.dtype, query.shape, key.dtype)
    assert isinstance(scale, float)
    if name in ("inverse_sqrt", "inverse_dim", "mup", "unscaled", "constant", "temperature", "yarn"):
        assert new_query is query
        assert new_key is key


def test_a_learned_scale_is_multiplied_in_float32_and_rounded_once():
    query, key = tensors(torch.bfloat16)
    rule = rules.LearnedTemperature(heads)
    with torch.no_grad():
        rule.log_temperature.fill_(0.123)
    once = (query.float() * math.exp(-0.123)).bfloat16()
    torch.testing.assert_close(rule(query, key)[0], once, rtol=0, atol=0)


@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_a_learned_rule_are_right(name):
    query, key = (tensor[:1, :, :3].clone().requires_grad_() for tensor in tensors())  # every element is moved twice
    value = torch.randn(1, heads, 3, 5, dtype=torch.float64)
    rule = EXAMPLES[name].make(heads, heads, head_dim)
    names, parameters = zip(*rule.named_parameters(), strict=True)

    def run(query, key, *parameters):
        def scale(query, key, visible=None):
            return torch.func.functional_call(rule, dict(zip(names, parameters, strict=True)), (query, key, visible))

        return attention(query, key, value, scale=scale, softcap=5.0)

    assert gradcheck(run, (query, key, *parameters))


@pytest.mark.parametrize("name", LEARNED)
def test_learned_parameters_are_one_dimensional_at_least_and_survive_a_round_trip(name):
    rule = EXAMPLES[name].make(heads, heads, head_dim)
    assert list(rule.parameters())
    assert all(parameter.dim() >= 1 for parameter in rule.parameters())
    fresh = get_rule(name, head_dim=head_dim, heads=heads).double()
    query, key = tensors()
    before = scores(fresh(query, key))
    fresh.load_state_dict(rule.state_dict())
    np.testing.assert_array_equal(scores(fresh(query, key)), scores(rule(query, key)))
    assert not np.allclose(before, scores(rule(query, key)))


@pytest.mark.parametrize("name", ["LearnedTemperature", "QueryTemperature"])
def test_learned_temperatures_start_at_the_default(name):
    query, key = tensors()
    rule = get_rule(name, head_dim=head_dim, heads=heads)
    np.testing.assert_allclose(scores(rule(query, key)), scores(rules.inverse_sqrt(query, key)), rtol=1e-7)


def test_mup_equals_the_default_at_its_base_and_inverse_dim_at_base_one():
    tensors = torch.randn(2, 2, 64)
    assert rules.mup(1)(*tensors)[2] == rules.inverse_dim(*tensors)[2] == 1 / 64
    assert rules.mup()(*tensors)[2] == rules.inverse_sqrt(*tensors)[2] == 0.125


def test_cosine_starts_at_ten_and_never_passes_a_hundred():
    query, _ = tensors()
    rule = rules.Cosine(heads)
    assert np.abs(scores(rule(query, query))).max() == pytest.approx(10.0, rel=1e-6)
    with torch.no_grad():
        rule.log_inverse_temperature.fill_(50.0)
    assert np.abs(scores(rule(query, query))).max() == pytest.approx(100.0, rel=1e-6)


@pytest.mark.parametrize("name", ["QKNorm", "Cosine"])
def test_zero_vectors_stay_finite(name):
    query, key = torch.zeros(1, heads, q_len, head_dim), torch.zeros(1, heads, kv_len, head_dim)
    assert np.isfinite(scores(get_rule(name, head_dim=head_dim, heads=heads)(query, key))).all()


@pytest.mark.parametrize("shape", [(40, 16), (3, 40, 16), (2, 3, 40, 16), (2, 2, 3, 40, 16)])
def test_calibrated_gives_every_head_unit_variance_for_any_means(shape):
    query = torch.randn(shape) * 3 + 2
    key = torch.randn(*shape[:-2], 50, 16) * 0.2 + 30  # a mean far above the spread: no cancellation may show
    found = scores(rules.calibrated(query, key))
    per_head = np.moveaxis(found, -3, 0).reshape(shape[-3], -1) if len(shape) > 2 else found.reshape(1, -1)
    np.testing.assert_allclose(per_head.std(-1), 1.0, rtol=1e-4)


def test_calibrated_leaves_constant_scores_finite():
    query = torch.ones(1, 1, 4, 8)
    assert np.isfinite(scores(rules.calibrated(query, query))).all()


def test_visible_may_be_a_number_a_row_or_a_column():
    query, key = tensors()
    rule = rules.log_length()
    counts = torch.arange(1, q_len + 1)
    by_row, by_column = scores(rule(query, key, counts)), scores(rule(query, key, counts[:, None]))
    np.testing.assert_array_equal(by_row, by_column)
    np.testing.assert_allclose(scores(rule(query, key)), scores(rule(query, key, kv_len)))
    np.testing.assert_allclose(by_row[..., 2, :], scores(rule(query, key, 3))[..., 2, :])


def test_rules_can_be_pickled_compared_and_read():
    for name in ("constant", "temperature", "yarn", "mup", "log_length"):
        rule = EXAMPLES[name].make(heads, heads, head_dim)
        assert pickle.loads(pickle.dumps(rule)) == rule
        assert rules.rule_name(rule).startswith(f"{name}(")
    assert rules.rule_name(rules.inverse_sqrt) == "inverse_sqrt"


def test_names_are_found_however_they_are_written():
    assert get_rule("inverse-sqrt") is rules.inverse_sqrt
    assert isinstance(get_rule("qk_norm", head_dim=head_dim, heads=heads), rules.QKNorm)
    assert get_rule("temperature:8") == rules.temperature(8.0)
    assert get_rule("mup:32") == rules.mup(32.0)
    assert get_rule(rules.log_length) == rules.log_length()
    assert get_rule(rules.unscaled) is rules.unscaled


def test_an_unknown_rule_is_answered_with_the_catalogue():
    with pytest.raises(UnknownRuleError, match=r"Unknown rule 'sqrt'\. Expected one of: calibrated, constant, Cosine"):
        get_rule("sqrt")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: get_rule("yarn"), r"The rule 'yarn' needs factor: make yarn\(factor=…\) once"),
        (lambda: get_rule("QKNorm"), r"needs head_dim, heads: make QKNorm\(head_dim=…, heads=…\) once"),
        (lambda: get_rule("inverse_sqrt:3"), "'inverse_sqrt' takes no number"),
        (lambda: get_rule("yarn:four"), "Expected a number after the colon of 'yarn:four'"),
        (lambda: get_rule(object()), "Expected a scale as a number, a tensor, a rule or a rule's name"),
        (lambda: rules.constant(math.inf), "finite number"),
        (lambda: rules.temperature(0.0), "tau to be a positive, finite number, got 0.0"),
        (lambda: rules.temperature(math.nan), "tau to be a positive, finite number"),
        (lambda: rules.yarn(0.5), "factor of 1 or more"),
        (lambda: rules.mup(-64), "base to be a positive"),
        (lambda: rules.log_length(0), "s to be a positive"),
    ],
)
def test_a_bad_parameter_is_refused_with_what_to_write(make, sentence):
    with pytest.raises(SettingError, match=sentence):
        make()


def test_a_rule_made_for_other_heads_says_so():
    query, key = tensors()
    with pytest.raises(ShapeError, match=r"made for 4 heads, but .* has 3; make the rule with heads=3"):
        rules.LearnedTemperature(4)(query, key)
