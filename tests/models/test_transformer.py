import math

import pytest
import torch

from attnscale import score_stats
from attnscale.errors import SettingError, ShapeError
from attnscale.models import CausalTransformer
from attnscale.models.transformer import rotate

batch, length, heads, head_dim, vocabulary = 2, 13, 3, 14, 29


def make(**options):
    return CausalTransformer(vocabulary, d_model=42, layers=2, heads=heads, head_dim=head_dim, **options)


def test_logits_do_not_depend_on_later_tokens():
    model = make()
    tokens = torch.randint(vocabulary, (batch, length))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % vocabulary
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_rotation_keeps_norms_and_makes_products_a_function_of_distance():
    q, k = torch.randn(2, 1, 1, head_dim, dtype=torch.float64).expand(2, 1, length, head_dim)
    q, k = rotate(q), rotate(k)
    torch.testing.assert_close(q.norm(dim=-1), q[:, :1].norm(dim=-1).expand(1, length), rtol=1e-6, atol=0)
    products = (q @ k.mT)[0]
    torch.testing.assert_close(products[3, 1], products[9, 7], rtol=1e-4, atol=1e-5)
    assert not torch.isclose(products[3, 1], products[3, 2], rtol=1e-3)


def unscaled(head_dim):
    attention = CausalTransformer(7, d_model=512, layers=1, heads=8, head_dim=head_dim).blocks[0].attention
    x = torch.randn(4, 64, 512)
    query, key = (rotate(attention._split(project(x))) for project in (attention.query, attention.key))
    return score_stats(query, key, scale="unscaled")


def test_products_start_with_a_spread_of_root_d_k():
    # 8 heads of random weights: the spread of one head varies by about 2%
    assert unscaled(64).std.mean().item() == pytest.approx(math.sqrt(64), rel=0.03)
    assert unscaled(16).std.mean().item() == pytest.approx(math.sqrt(16), rel=0.03)


@pytest.mark.parametrize("options", [{"scale": "inverse_dim"}, {"scale": 0.5}, {"softcap": 5.0}, {"qk_norm": True}])
def test_options_change_the_output_and_get_gradients(options):
    torch.manual_seed(1)
    plain = make()
    model = make(**options)
    model.load_state_dict(plain.state_dict(), strict=False)
    tokens = torch.randint(vocabulary, (batch, length))
    assert not torch.allclose(plain(tokens), model(tokens))
    model(tokens).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_learned_rule_by_name_is_one_module_a_layer_with_parameters():
    model = make(scale="LearnedTemperature")
    rules = [block.attention.scale for block in model.blocks]
    assert rules[0] is not rules[1]
    assert {id(p) for rule in rules for p in rule.parameters()} <= {id(p) for p in model.parameters()}


def test_reset_parameters_starts_everything_anew():
    model = make(qk_norm=True, scale="QKNorm")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 3.0)
    model.reset_parameters()
    assert all(not (parameter == 3.0).all() for parameter in model.parameters())


def test_bad_sizes_get_one_sentence():
    with pytest.raises(SettingError, match="heads that divide d_model"):
        CausalTransformer(7, d_model=10, heads=3)
    with pytest.raises(SettingError, match="even head_dim"):
        CausalTransformer(7, d_model=10, heads=2)
    with pytest.raises(ShapeError, match=r"\(batch, length\), got \(3,\)"):
        make()(torch.zeros(3, dtype=torch.int64))
