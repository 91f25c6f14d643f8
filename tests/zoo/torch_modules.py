"""torch.nn's own modules: with their fast path (eval, no gradient) and without."""

import torch
from torch import nn

from .bases import above_diagonal
from .entry import Expected, enter


class Attended(nn.Module):
    """nn.MultiheadAttention called the way one calls it."""

    def __init__(self, d_model, heads, **settings):
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, heads, **settings)

    def forward(self, query, memory=None, **call):
        memory = query if memory is None else memory
        return self.attention(query, memory, memory, **call)[0]


class Weighted(Attended):
    """… asked for its weights, which it averages over heads."""

    def forward(self, query):
        output, weights = self.attention(query, query, query, need_weights=True)
        return output * weights.sum()


class Unweighted(Attended):
    """… told that nobody needs the weights, and causal."""

    def forward(self, query):
        mask = above_diagonal(query.shape[1])
        return self.attention(query, query, query, need_weights=False, attn_mask=mask)[0]


class Padded(Attended):
    """… with a padding mask."""

    def forward(self, query):
        padding = torch.arange(query.shape[1]) >= torch.tensor([[query.shape[1]], [9]])
        return self.attention(query, query, query, key_padding_mask=padding)[0]


def own(name, heads, head_dim, make, *inputs, causal=False, train=False, paths=("attention",)):
    """Enter a module and inputs of these shapes."""
    expected = Expected(heads, head_dim, head_dim**-0.5, heads, causal)

    def model_and_inputs():
        return make(), tuple(torch.randn(shape) for shape in inputs)

    enter(f"torch_modules.{name}", model_and_inputs, dict.fromkeys(paths, expected), train=train)


def batch_first(kind, *sizes, **settings):
    return lambda: kind(*sizes, batch_first=True, **settings)


own("MultiheadAttention", 3, 11, batch_first(Attended, 33, 3), (2, 13, 33))
own("MultiheadAttention-train", 3, 13, lambda: Attended(39, 3, dropout=0.1), (13, 2, 39), train=True)
own("MultiheadAttention-weights", 3, 17, batch_first(Weighted, 51, 3), (2, 13, 51))
own("MultiheadAttention-causal", 5, 7, batch_first(Unweighted, 35, 5), (2, 13, 35), causal=True)
own("MultiheadAttention-padded", 2, 19, batch_first(Padded, 38, 2), (2, 13, 38))
own("MultiheadAttention-cross", 3, 11, batch_first(Attended, 33, 3, kdim=29, vdim=29), (2, 7, 33), (2, 13, 29))
own("MultiheadAttention-unbatched", 2, 17, batch_first(Attended, 34, 2), (13, 34))
own("MultiheadAttention-extra-keys", 3, 13, lambda: Attended(39, 3, add_bias_kv=True, add_zero_attn=True), (13, 2, 39))


def layer(**settings):
    return nn.TransformerEncoderLayer(38, 2, 47, dropout=0.0, batch_first=True, **settings)


def unlike_bert():
    return layer(norm_first=True, activation="gelu")


def encoder():
    return nn.TransformerEncoder(layer(), 3, enable_nested_tensor=False)


own("EncoderLayer", 2, 19, layer, (2, 13, 38), paths=["self_attn"])
own("EncoderLayer-train", 2, 19, layer, (2, 13, 38), paths=["self_attn"], train=True)
own("EncoderLayer-norm-first", 2, 19, unlike_bert, (2, 13, 38), paths=["self_attn"])
own("Encoder", 2, 19, encoder, (2, 13, 38), paths=[f"layers.{index}.self_attn" for index in range(3)])


class PaddedEncoder(nn.Module):
    """An encoder with a padding mask: in eval, without gradients, torch drops the padding into a nested tensor."""

    def __init__(self, nested):
        super().__init__()
        self.encoder = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=nested)

    def forward(self, x):
        padding = torch.arange(x.shape[1]) >= torch.tensor([[x.shape[1]], [9]])
        return self.encoder(x, src_key_padding_mask=padding)


for name, nested in (("Encoder-padded", False), ("Encoder-nested", True)):
    paths = [f"encoder.layers.{index}.self_attn" for index in range(2)]
    own(name, 2, 19, lambda nested=nested: PaddedEncoder(nested), (2, 13, 38), paths=paths)


class Decoded(nn.Module):
    """A decoder layer: causal self-attention, then attention to a longer memory."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(46, 2, 53, dropout=0.0, batch_first=True)

    def forward(self, x, memory):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, memory, tgt_mask=mask, tgt_is_causal=True)


decoder = Expected(2, 23, 23**-0.5, 2)
enter(
    "torch_modules.DecoderLayer",
    lambda: (Decoded(), (torch.randn(2, 7, 46), torch.randn(2, 13, 46))),
    {"layer.self_attn": Expected(2, 23, 23**-0.5, 2, causal=True), "layer.multihead_attn": decoder},
)
