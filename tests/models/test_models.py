"""The plain transformer, and the trained model that ships with the package."""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attnscale import score_stats
from attnscale.errors import SettingError, ShapeError
from attnscale.models import CausalTransformer, decode, default_text, encode, load_bundled
from attnscale.models.bundled import WEIGHTS, about_bundled, split
from attnscale.models.transformer import rotate

TRAINING = Path(__file__).parents[2] / "scripts" / "train_bundled_model.py"
batch, length, heads, head_dim, vocabulary = 2, 13, 3, 14, 29


def make(**options):
    return CausalTransformer(vocabulary, d_model=42, layers=2, heads=heads, head_dim=head_dim, **options)


def test_logits_do_not_depend_on_later_tokens():
    model, tokens = make(), torch.randint(vocabulary, (batch, length))
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


@pytest.mark.parametrize("head_dim", [16, 64])
def test_products_start_with_a_spread_of_root_d_k(head_dim):
    attention = CausalTransformer(7, d_model=512, layers=1, heads=8, head_dim=head_dim).blocks[0].attention
    x = torch.randn(4, 64, 512)
    query, key = (rotate(attention._split(project(x))) for project in (attention.query, attention.key))
    spread = score_stats(query, key, scale="unscaled").std.mean().item()
    assert spread == pytest.approx(math.sqrt(head_dim), rel=0.03)  # that of one head varies by about 2%


@pytest.mark.parametrize("options", [{"scale": "inverse_dim"}, {"scale": 0.5}, {"softcap": 5.0}, {"qk_norm": True}])
def test_options_change_the_output_and_get_gradients(options):
    torch.manual_seed(1)
    plain, model, tokens = make(), make(**options), torch.randint(vocabulary, (batch, length))
    model.load_state_dict(plain.state_dict(), strict=False)
    assert not torch.allclose(plain(tokens), model(tokens))
    model(tokens).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_learned_rule_by_name_is_one_module_a_layer_and_reset_with_all_parameters():
    model = make(qk_norm=True, scale="LearnedTemperature")
    rules = [block.attention.scale for block in model.blocks]
    assert rules[0] is not rules[1]
    assert {id(p) for rule in rules for p in rule.parameters()} <= {id(p) for p in model.parameters()}
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


# The bundled model


def test_the_bundled_model_reaches_its_recorded_loss_on_other_text():
    model, tokens = load_bundled()
    loss = runpy.run_path(str(TRAINING))["loss"](model, split(default_text())[1][:5140])
    about = about_bundled()
    recorded = float(about["held_out_loss_nats_per_byte"])
    assert recorded < 1.2
    # 20 windows of some text, in whichever edition of it this Python ships; untrained it is ln 256 = 5.5 and more
    assert loss == pytest.approx(recorded, abs=0.35)
    assert {"shape", "seed", "steps", "corpus", "corpus_sha256", "torch"} <= about.keys()
    assert json.loads(about["shape"])["vocabulary"] == 256
    assert 0 < len(WEIGHTS.read_bytes()) <= 4_000_000
    assert not model.training
    assert tokens.shape == (1, model.context)


def test_bytes_come_back_as_text():
    assert decode(encode("softmax(QKᵀ/√d_k)")) == "softmax(QKᵀ/√d_k)"
    assert len(default_text()) > 400_000


def test_training_twice_with_a_seed_gives_the_same_weights(tmp_path, monkeypatch):
    main = runpy.run_path(str(TRAINING))["main"]
    main.__globals__.update(STEPS=2, BATCH=2, loss=lambda model, tokens: 0.0)
    for name in ("first", "second"):
        monkeypatch.setattr("sys.argv", ["bundled.py", str(tmp_path / name)])
        main()
    first, second = load_file(tmp_path / "first"), load_file(tmp_path / "second")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
