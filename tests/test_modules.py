"""MultiheadAttention against nn.MultiheadAttention, and what it adds."""

import copy

import pytest
import torch
from torch import nn

from attnscale import MultiheadAttention, rules
from attnscale.errors import SettingError, ShapeError

batch, heads, q_len, kv_len, head_dim = 2, 3, 5, 7, 4
embed_dim = heads * head_dim


def twins(**options):
    """nn.MultiheadAttention with random biases, and ours with its state dict loaded."""
    torch_layer = nn.MultiheadAttention(embed_dim, heads, **options)
    with torch.no_grad():
        for parameter in torch_layer.parameters():
            parameter.normal_(std=0.5)
    ours = MultiheadAttention(embed_dim, heads, **options)
    ours.load_state_dict(torch_layer.state_dict())
    return torch_layer.eval(), ours.eval()


def inputs(batch_first=False, kdim=embed_dim, vdim=embed_dim, batched=True):
    tensors = torch.randn(batch, q_len, embed_dim), torch.randn(batch, kv_len, kdim), torch.randn(batch, kv_len, vdim)
    if not batched:
        return tuple(tensor[0] for tensor in tensors)
    return tensors if batch_first else tuple(tensor.transpose(0, 1) for tensor in tensors)


LAYERS = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"kdim": 6, "vdim": 10},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
]
hidden = torch.rand(q_len, kv_len) < 0.3
hidden[:, 0] = False  # nn.MultiheadAttention answers a row that sees nothing with NaN
padding = torch.tensor([[False] * 5 + [True] * 2, [False] * 7])
MASKS = [
    {},
    {"attn_mask": hidden},
    {"attn_mask": torch.randn(q_len, kv_len)},
    {"attn_mask": torch.rand(batch * heads, q_len, kv_len).lt(0.3).logical_and(torch.arange(kv_len) > 0)},
    {"key_padding_mask": padding},
    {"key_padding_mask": padding, "attn_mask": hidden},
    {
        "key_padding_mask": torch.zeros(batch, kv_len).masked_fill(padding, -9.0),
        "attn_mask": torch.randn(q_len, kv_len),
    },
    {"attn_mask": torch.ones(q_len, kv_len, dtype=torch.bool).triu(1), "is_causal": True},
    {"attn_mask": torch.ones(q_len, kv_len, dtype=torch.bool).triu(1), "is_causal": True, "key_padding_mask": padding},
]


@pytest.mark.parametrize("masks", MASKS, ids=lambda masks: "+".join(masks) or "no mask")
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: "+".join(layer) or "default")
@pytest.mark.parametrize("need_weights", [True, False])
def test_outputs_and_weights_are_those_of_torch(layer, masks, need_weights):
    theirs, ours = twins(**layer)
    tensors = inputs(**{name: layer[name] for name in ("batch_first", "kdim", "vdim") if name in layer})
    for average in (True, False):
        # With is_causal and no weights, torch hides the keys it appends itself; ours shows them either way.
        hint = {"is_causal": False} if {"add_bias_kv", "add_zero_attn"} & layer.keys() else {}
        expected = theirs(*tensors, need_weights=need_weights, average_attn_weights=average, **(masks | hint))
        found = ours(*tensors, need_weights=need_weights, average_attn_weights=average, **masks)
        torch.testing.assert_close(found[0], expected[0])
        assert (found[1] is None) == (expected[1] is None)
        if need_weights:
            torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("need_weights", [True, False])
def test_unbatched_input(need_weights):
    theirs, ours = twins()
    tensors = inputs(batched=False)
    masks = {"key_padding_mask": padding[0], "attn_mask": hidden}
    for found, expected in zip(
        ours(*tensors, need_weights=need_weights, **masks),
        theirs(*tensors, need_weights=need_weights, **masks),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_gradients_and_state_dict_are_those_of_torch():
    theirs, ours = twins(batch_first=True)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    tensors = inputs(batch_first=True)
    for layer in (theirs, ours):
        layer(*tensors, need_weights=False)[0].square().sum().backward()
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_dropout_draws_what_torch_draws():
    theirs, ours = twins(dropout=0.5)
    tensors = inputs()
    for need_weights in (True, False):
        torch.manual_seed(1)
        expected = theirs.train()(*tensors, need_weights=need_weights)[0]
        torch.manual_seed(1)
        torch.testing.assert_close(ours.train()(*tensors, need_weights=need_weights)[0], expected)


def test_is_causal_alone_means_causal():
    _, ours = twins()
    mask = torch.ones(q_len, kv_len, dtype=torch.bool).triu(1)
    tensors = inputs()
    for need_weights in (True, False):
        found = ours(*tensors, need_weights=need_weights, is_causal=True)[0]
        torch.testing.assert_close(found, ours(*tensors, attn_mask=mask)[0])


@pytest.mark.parametrize("scale", [0.2, "calibrated", "log_length", rules.yarn(4.0), torch.rand(heads, 1, 1)])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_weights_and_output_agree_for_every_scale(scale, softcap):
    layer = MultiheadAttention(embed_dim, heads, scale=scale, softcap=softcap).eval()
    tensors = inputs()
    with_weights, weights = layer(*tensors)
    torch.testing.assert_close(with_weights, layer(*tensors, need_weights=False)[0])
    torch.testing.assert_close(weights.sum(-1), torch.ones(batch, q_len))
    plain = MultiheadAttention(embed_dim, heads).eval()
    plain.load_state_dict(layer.state_dict())
    assert not torch.allclose(plain(*tensors)[0], with_weights)


@pytest.mark.parametrize("name", ["LearnedTemperature", "QueryTemperature", "QKNorm", "Cosine"])
def test_a_learned_rule_by_name_is_made_trained_and_saved(name):
    layer = MultiheadAttention(embed_dim, heads, scale=name, dtype=torch.float64)
    tensors = [tensor.double() for tensor in inputs()]
    layer(*tensors, need_weights=False)[0].square().sum().backward()
    learned = [parameter for key, parameter in layer.named_parameters() if key.startswith("rule.")]
    assert learned
    assert all(p.dtype == torch.float64 and p.grad is not None and p.grad.abs().max() > 0 for p in learned)
    with torch.no_grad():
        for parameter in learned:
            parameter.add_(0.1)
    other = MultiheadAttention(embed_dim, heads, scale=name, dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(*tensors)[0], layer(*tensors)[0])
    assert copy.deepcopy(layer)(*tensors)[0].shape == (q_len, batch, embed_dim)


def test_a_plain_state_dict_loads_into_a_layer_whose_rule_learns():
    theirs, _ = twins()
    stack = nn.Sequential(MultiheadAttention(embed_dim, heads, scale="LearnedTemperature")).eval()
    stack.load_state_dict({f"0.{name}": value for name, value in theirs.state_dict().items()})
    tensors = inputs()
    torch.testing.assert_close(stack[0](*tensors)[0], theirs(*tensors)[0])  # it starts at √d_k
    incomplete = {"0.rule.log_temperature": torch.zeros(heads)}
    with pytest.raises(RuntimeError, match="Missing key"):
        stack.load_state_dict(incomplete)


def test_the_encoder_layers_fast_path_does_not_bypass_the_scale():
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).eval()
    x = torch.randn(3, 5, 16)
    encoder.self_attn = MultiheadAttention(16, 2, batch_first=True, scale=3.0).eval()
    with torch.no_grad():
        fast = encoder(x)
    torch.testing.assert_close(fast, encoder(x).detach())  # with gradients there is no fast path
    encoder.self_attn.rule = 0.0
    assert not torch.allclose(fast, encoder(x))


def test_shapes_that_do_not_fit_are_named():
    layer = MultiheadAttention(embed_dim, heads)
    query, key, value = inputs()
    with pytest.raises(ShapeError, match="2 or 3 dimensions each"):
        layer(query, key[0], value)
    with pytest.raises(ShapeError, match=r"attn_mask of shape \(5, 7\), got \(7, 5\)"):
        layer(query, key, value, attn_mask=torch.zeros(kv_len, q_len))
    with pytest.raises(ShapeError, match=r"key_padding_mask of shape \(2, 7\), got \(2, 5\)"):
        layer(query, key, value, key_padding_mask=torch.zeros(batch, q_len, dtype=torch.bool))
    with pytest.raises(SettingError, match="Unknown rule"):
        MultiheadAttention(embed_dim, heads, scale="sqrt")
