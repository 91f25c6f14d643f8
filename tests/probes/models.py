"""Small models that the tests of probes train, and the batches they take."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import attnscale
from attnscale.models import CausalTransformer

VOCABULARY = 31
HEADS, HEAD_DIM, LENGTH = 3, 7, 13
WIDTH = HEADS * HEAD_DIM


def tokens(step, batch=3, length=24, device="cpu"):
    drawn = torch.randint(0, VOCABULARY, (batch, length + 1), generator=torch.Generator().manual_seed(step))
    return drawn.to(device)


def padded_tokens(step, length=LENGTH, **settings):
    """Return the batch of a step in which token 0 pads the first sequence."""
    drawn = tokens(step, length=length, **settings)
    drawn[0, 7 + step % 3 : -1] = 0
    return drawn


def seeded(kind, *args, **settings):
    """Return a function that makes the same model at each call."""

    def make():
        torch.manual_seed(0)
        return kind(*args, **settings)

    return make


def small_model(**changes):
    """Return a transformer with two layers of two heads."""
    torch.manual_seed(0)
    return CausalTransformer(VOCABULARY, **({"d_model": 32, "layers": 2, "heads": 2} | changes))


def one_layer():
    return small_model(layers=1)


class Attention(nn.Module):
    """Attend with `attend(query, key, value)`, to which doubled queries are given."""

    def __init__(self, attend, width=12, heads=2, kv_heads=None, head_dim=None, *, packed=True):
        super().__init__()
        self.attend, self.packed, self.head_dim = attend, packed, head_dim or width // heads
        self.sizes = [count * self.head_dim for count in (heads, kv_heads or heads, kv_heads or heads)]
        self.projections = nn.ModuleList(
            nn.Linear(width, size) for size in ([sum(self.sizes)] if packed else self.sizes)
        )
        self.output = nn.Linear(self.sizes[0], width)

    def forward(self, x):
        parts = [projection(x) for projection in self.projections]
        if self.packed:
            parts = parts[0].split(self.sizes, -1)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        return self.output(self.attend(2 * query, key, value).transpose(1, 2).flatten(2))


class Layers(nn.Module):
    """Residual layers: modules, or functions that are called as `Attention` calls them."""

    def __init__(self, *layers, width=12, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.blocks = nn.ModuleList(
            layer if isinstance(layer, nn.Module) else Attention(layer, width, **settings) for layer in layers
        )

    def forward(self, given):
        x = self.embedding(given)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def hidden_after(length):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def fused(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def written(query, key, value):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return scores.masked_fill(hidden_after(query.shape[-2]), -math.inf).softmax(-1) @ value


def masked_by_addition(query, key, value):
    mask = torch.where(hidden_after(query.shape[-2]), torch.finfo(query.dtype).min, 0.0)
    weights = F.softmax(torch.matmul(query, key.transpose(2, 3)) * 0.4 + mask, dim=-1, dtype=torch.float32)
    return torch.matmul(F.dropout(weights, 0.0), value)


def capped(query, key, value):
    scores = 3.0 * torch.tanh(query @ key.mT * 0.5 / 3.0)
    return scores.masked_fill(hidden_after(query.shape[-2]), -math.inf).softmax(-1) @ value


def by_einsum(query, key, value):
    scores = torch.einsum("bhid,bhjd->bhij", query, key) * query.shape[-1] ** -0.5
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), value)


def by_baddbmm(query, key, value):
    rows, keys, values = (part.flatten(0, 1) for part in (query, key, value))
    scores = torch.baddbmm(rows.new_zeros(1, 1, 1), rows, keys.mT, beta=0, alpha=query.shape[-1] ** -0.5)
    return (scores.softmax(-1) @ values).unflatten(0, query.shape[:2])


def keys_first(query, key, value):
    scores = key @ query.mT * query.shape[-1] ** -0.5
    return scores.softmax(-2).mT @ value


WRITTEN = (written, masked_by_addition, capped, by_einsum, by_baddbmm, keys_first)


class Padded(Layers):
    """Written-out attention that hides keys of padding."""

    def __init__(self):
        super().__init__(self.attend)

    def forward(self, given):
        self.shown = (given != 0)[:, None, None, :]
        return super().forward(given)

    def attend(self, query, key, value):
        scores = query @ key.mT * query.shape[-1] ** -0.5
        scores = scores.masked_fill(~self.shown, torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ value


class Checkpointed(nn.Module):
    """A block that runs again in the backward pass."""

    def __init__(self, block, use_reentrant):
        super().__init__()
        self.checkpointed, self.use_reentrant = block, use_reentrant

    def forward(self, *args):
        return checkpoint(self.checkpointed, *args, use_reentrant=self.use_reentrant)


def checkpointed(model, use_reentrant=False):
    model.blocks = nn.ModuleList(Checkpointed(block, use_reentrant) for block in model.blocks)
    return model


class Reused(nn.Module):
    """One attention that runs three times in a forward, as ALBERT's does, and one beside it that attends twice."""

    def __init__(self, width=16):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.again, self.twice = Attention(fused, width), Twice(width)

    def forward(self, given):
        x = 0.1 * self.embedding(given)
        for _ in range(3):
            x = x + 0.1 * self.again(x)
        return self.head(x + 0.1 * self.twice(x))


class Twice(nn.Module):
    """Attend twice in one run, each time with other projections."""

    def __init__(self, width):
        super().__init__()
        self.causal, self.full = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def forward(self, x):
        for projection, is_causal in ((self.causal, True), (self.full, False)):
            query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in projection(x).chunk(3, -1))
            out = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
            x = x + out.transpose(1, 2).flatten(2)
        return x


class Encoder(nn.Module):
    """torch's own encoder, which hides later tokens, padding, both or nothing."""

    def __init__(self, hides="", dropout=0.1):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 29, dropout, batch_first=True)
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.encoder, self.hides = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), hides

    def forward(self, given):
        return self.head(
            self.encoder(
                self.embedding(given),
                mask=hidden_after(given.shape[1]) if "later" in self.hides else None,
                is_causal="later" in self.hides,
                src_key_padding_mask=given == 0 if "padding" in self.hides else None,
            )
        )


class Pooled(nn.Module):
    """Attention with a learned query."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.pool = nn.MultiheadAttention(WIDTH, HEADS, 0.1, batch_first=True)
        self.query = nn.Parameter(torch.randn(1, 5, WIDTH))

    def forward(self, given):
        x = self.embedding(given)
        pooled = self.pool(self.query.expand(len(x), -1, -1), x, x, need_weights=False)[0]
        return self.head(x + pooled.mean(1, keepdim=True))


class HuggingFace(nn.Module):
    """A causal model of Hugging Face, called with tokens alone."""

    def __init__(self, kind, **config):
        import transformers

        super().__init__()
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(vocab_size=VOCABULARY, use_cache=False, **config)
        self.inner = transformers.AutoModelForCausalLM.from_config(config)

    def forward(self, given):
        return self.inner(input_ids=given).logits


def llama(implementation, width=16, layers=1):
    """Return a Llama with two keys for four heads."""
    sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return HuggingFace("Llama", attn_implementation=implementation, **sizes, **heads)


def gpt2():
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 37}
    return HuggingFace("GPT2", attn_implementation="sdpa", **sizes)


def flex(kind, layers=1, width=32, length=24, device="cpu"):
    """Return a model of FlexAttention with documents, a window, a soft-cap or a bias."""
    documents = torch.arange(length, device=device) // 7
    masks = {
        "documents": lambda b, h, i, j: (documents[i] == documents[j]) & (j <= i),
        "window": lambda b, h, i, j: (j <= i) & (i - j < 5),
    }
    scores = {
        "soft-cap": lambda s, b, h, i, j: 3 * torch.tanh(s / 3),
        "bias": lambda s, b, h, i, j: s - 0.1 * (i - j),
    }
    mask = create_block_mask(masks.get(kind, lambda b, h, i, j: j <= i), None, None, length, length, device=device)

    def attend(query, key, value):
        if device == "cpu":  # torch 2.11 takes no packed ones there
            query, key, value = (part.contiguous() for part in (query, key, value))
        return flex_attention(query, key, value, score_mod=scores.get(kind), block_mask=mask)

    return Layers(*[attend] * layers, width=width).to(device)


def dropping(by=1.0, call=None, **settings):
    """Return an attention that drops weights, which SDPA does on a CPU by the operations it is made of."""

    def attend(query, key, value):
        attention = call or F.scaled_dot_product_attention  # looked up at each call, as models do
        return attention(by * query, by * key, value, **({"dropout_p": 0.1, "enable_gqa": True} | settings))

    return attend


def every_setting_of_sdpa():
    first_keys = torch.arange(LENGTH).expand(LENGTH, LENGTH) < 11
    ways = (
        dropping(is_causal=True),
        dropping(by=0.7, scale=1.0),  # queries and keys are multiplied before SDPA takes them
        dropping(by=0.5, scale=0.3),
        dropping(attn_mask=first_keys),
        dropping(attn_mask=torch.where(first_keys, 0.0, torch.finfo(torch.float32).min)[None, None]),
        dropping(call=attnscale.attention, is_causal=True),
        dropping(scale=-0.6),
    )
    shape = {"width": WIDTH, "heads": 2 * HEADS, "head_dim": HEAD_DIM, "packed": False}
    grouped = [Attention(way, kv_heads=HEADS, **shape) for way in ways]
    return Layers(*grouped, Attention(dropping(enable_gqa=False), **shape), width=WIDTH)


MODELS = {
    "transformer": small_model,
    "one layer": one_layer,
    "torch's encoder": seeded(Encoder, "later", 0.0),
    "an attention that runs again": seeded(Reused),
    "checkpoints": lambda: checkpointed(one_layer()),
    "dropout": seeded(Encoder),
    "dropout, padding": seeded(Encoder, "padding"),
    "dropout, later": seeded(Encoder, "later"),
    "dropout, both": seeded(Encoder, "later, padding"),
    "GPT-2": gpt2,
    "every setting of SDPA": seeded(every_setting_of_sdpa),
    "learned query": seeded(Pooled),
    "every way to write it": lambda: Layers(fused, *WRITTEN),
    "written out": lambda: Layers(written),
    "written out, padding": Padded,
    "written out, checkpoints": lambda: checkpointed(Layers(written)),
    "Llama, written out": lambda: llama("eager"),
    "Llama, SDPA": lambda: llama("sdpa"),
}
