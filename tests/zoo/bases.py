"""Attention in steps, of which a case replaces those in which it is special; and what its softmax is really given.

That is told by the zoo's own code, the oracle: an attention calls `note(self, scores)` just before its softmax. Nothing
happens unless a test is recording.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Configuration:
    """A configuration as models carry it."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


class Block(nn.Module):
    """x + attention(norm(x)), what nearly every attention lives in."""

    def __init__(self, d_model: int, attention: nn.Module):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.attention = attention

    def forward(self, x: Tensor, *rest) -> Tensor:
        return x + self.attention(self.norm(x), *rest)


class SelfAttention(nn.Module):
    """Attention in steps: project, prepare, attend, merge. A subclass replaces the steps in which it is special.

    Attending, unless a subclass calls a kernel, is: product, scale, adjust, weigh, mix.
    """

    right = False  # the fixed twin of a reported bug sets it
    kept_as = None  # attribute that the multiplier is kept in; None if it is computed at every call
    layout = "bhqk"  # axes of the scores, as `note` names them

    def __init__(self, d_model: int, heads: int, head_dim: int | None = None, kv_heads: int | None = None):
        super().__init__()
        self.d_model, self.heads, self.kv_heads = d_model, heads, kv_heads or heads
        self.head_dim = head_dim or d_model // heads
        self.q_proj = nn.Linear(d_model, self.heads * self.head_dim)
        self.k_proj = nn.Linear(d_model, self.kv_heads * self.head_dim)
        self.v_proj = nn.Linear(d_model, self.kv_heads * self.head_dim)
        self.out_proj = nn.Linear(self.heads * self.head_dim, d_model)
        self.add_parts()
        if self.kept_as is not None:
            setattr(self, self.kept_as, self.multiplier())

    def add_parts(self) -> None:
        """Add parameters and attributes of a subclass."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        return self.merge(self.attend(*self.prepare(query, key), value))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each (batch, heads, length, head_dim)."""
        return (
            self.split(self.q_proj(x)),
            self.split(self.k_proj(x), self.kv_heads),
            self.split(self.v_proj(x), self.kv_heads),
        )

    def split(self, x: Tensor, heads: int | None = None) -> Tensor:
        """(batch, length, heads · head_dim) to (batch, heads, length, head_dim)."""
        batch, length, _ = x.shape
        return x.view(batch, length, heads or self.heads, self.head_dim).transpose(1, 2)

    def prepare(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Scale, rotate or normalise queries and keys."""
        return query, key

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = self.adjust(self.scale_product(self.product(query, key)))
        note(self, scores, self.layout)
        return self.mix(self.weigh(scores), value)

    def product(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT

    def scale_product(self, product: Tensor) -> Tensor:
        return product * (self.multiplier() if self.kept_as is None else getattr(self, self.kept_as))

    def multiplier(self) -> float | Tensor:
        return self.head_dim**-0.5

    def adjust(self, scores: Tensor) -> Tensor:
        """Mask or cap the scores, or add a bias."""
        return scores

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def mix(self, weights: Tensor, value: Tensor) -> Tensor:
        return weights @ value

    def merge(self, x: Tensor) -> Tensor:
        """(batch, heads, length, head_dim) back to (batch, length, d_model)."""
        return self.out_proj(x.transpose(1, 2).flatten(2))


class Divided(SelfAttention):
    """q·k / √d_k, as it is printed, where others multiply."""

    def scale_product(self, product):
        return product / math.sqrt(self.head_dim)


class Bare(SelfAttention):
    """q·k as it is: queries and keys carry the scale, or nothing does."""

    def scale_product(self, product):
        return product


class Normed(SelfAttention):
    """Norms of each head's query and key."""

    norm = nn.RMSNorm

    def add_parts(self):
        self.q_norm, self.k_norm = self.norm(self.head_dim), self.norm(self.head_dim)

    def prepare(self, query, key):
        return self.q_norm(query), self.k_norm(key)


class Unit(SelfAttention):
    """Cosines of queries and keys."""

    def prepare(self, query, key):
        return F.normalize(query, dim=-1), F.normalize(key, dim=-1)


class Causal(SelfAttention):
    """Hides later keys with −∞."""

    def adjust(self, scores):
        return scores.masked_fill(above_diagonal(scores.shape[-2], scores.shape[-1]), -torch.inf)


class Kernel(SelfAttention):
    """A plain call of SDPA."""

    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value)


class HeadsLast(SelfAttention):
    """Query, key and value as (batch, length, heads, head_dim), and einsum."""

    scored, mixed, axis = "bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", -1

    def project(self, x):
        return [p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj)]

    def product(self, query, key):
        return torch.einsum(self.scored, query, key)

    def weigh(self, scores):
        return scores.softmax(dim=self.axis)

    def mix(self, weights, value):
        return torch.einsum(self.mixed, weights, value)

    def merge(self, x):
        return self.out_proj(x.flatten(-2))


class Einsum(SelfAttention):
    """einsum with the heads before the length."""

    def product(self, query, key):
        return torch.einsum("bhid,bhjd->bhij", query, key)

    def mix(self, weights, value):
        return torch.einsum("bhij,bhjd->bhid", weights, value)


class HeadsAsBatch(SelfAttention):
    """(batch · heads, length, head_dim) and torch.bmm."""

    layout = "nqk"

    def project(self, x):
        return [each.flatten(0, 1) for each in super().project(x)]

    def product(self, query, key):
        return torch.bmm(query, key.transpose(1, 2))

    def mix(self, weights, value):
        return torch.bmm(weights, value)

    def merge(self, x):
        return super().merge(x.unflatten(0, (-1, self.heads)))


def above_diagonal(q_len: int, kv_len: int | None = None) -> Tensor:
    """True where a causal attention must not look: keys after the query, the last query seeing every key."""
    kv_len = kv_len or q_len
    return torch.ones(q_len, kv_len, dtype=torch.bool).triu(1 + kv_len - q_len)


# The oracle

HIDDEN = -50.0  # no score of a correct attention in the zoo is as low; every mask is lower

_notes: dict[nn.Module, list[Tensor]] | None = None


def note(module: nn.Module, scores: Tensor | Callable[[], Tensor], layout: str = "bhqk", hidden: Tensor | None = None):
    """Keep the scores as (batch, heads, q_len, kv_len) in float64, −∞ where hidden.

    `layout` names the axes as they come: w are windows (more batch), g are groups of heads, "nqk" is batch · heads.
    """
    if _notes is None:
        return
    found = (scores() if callable(scores) else scores).detach().double()
    if hidden is not None:
        found = found.masked_fill(hidden, -torch.inf)
    if layout[0] == "n":
        found, layout = found.unflatten(0, (-1, module.heads)), "bh" + layout[1:]
    for axis in "wbghqk":
        if axis not in layout:
            found, layout = found.unsqueeze(0), axis + layout
    found = torch.einsum(f"{layout}->wbghqk", found).flatten(2, 3).flatten(0, 1)
    _notes.setdefault(module, []).append(found.masked_fill(found < HIDDEN, -torch.inf))


@contextmanager
def recording(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Fill the dictionary, on leaving, with the scores of every attention by its path; calls are more batch."""
    global _notes
    _notes = {}
    hooks = [
        module.register_forward_pre_hook(_note_torch_module, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
    ]
    by_name: dict[str, Tensor] = {}
    try:
        yield by_name
        names = {module: name for name, module in model.named_modules()}
        by_name.update({names[module]: _together(calls) for module, calls in _notes.items()})
    finally:
        _notes = None
        for hook in hooks:
            hook.remove()


def _together(calls: list[Tensor]) -> Tensor:
    """Calls of different lengths in one batch: the longer ones' rows and keys are hidden in the shorter."""
    q_len, kv_len = (max(call.shape[axis] for call in calls) for axis in (-2, -1))
    padded = [
        nn.functional.pad(call, (0, kv_len - call.shape[-1], 0, q_len - call.shape[-2]), value=-torch.inf)
        for call in calls
    ]
    return torch.cat(padded)


def _note_torch_module(module: nn.MultiheadAttention, args, kwargs) -> None:
    """The scores of nn.MultiheadAttention from its weights and its arguments, with no code of its own."""
    if getattr(module, "unrecorded", False):
        return
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key = given["query"], given["key"]
    if module._qkv_same_embed_dim:
        q_weight, k_weight, _ = module.in_proj_weight.chunk(3)
    else:
        q_weight, k_weight = module.q_proj_weight, module.k_proj_weight
    biases = (None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[:2]
    query, key = nn.functional.linear(query, q_weight, biases[0]), nn.functional.linear(key, k_weight, biases[1])
    if not module.batch_first and query.dim() == 3:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    if query.dim() == 2:
        query, key = query[None], key[None]
    if module.bias_k is not None:
        key = torch.cat([key, module.bias_k.expand(key.shape[0], 1, -1)], 1)
    if module.add_zero_attn:
        key = torch.cat([key, key.new_zeros(key.shape[0], 1, key.shape[2])], 1)
    query, key = (x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in (query, key))
    scores = query @ key.mT / module.head_dim**0.5
    extra = key.shape[2] - given["key"].shape[1 if module.batch_first else 0]
    if given.get("attn_mask") is not None:
        mask = nn.functional.pad(given["attn_mask"], (0, extra))
        if mask.dim() == 3:
            mask = mask.unflatten(0, (-1, module.num_heads))
        scores = scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if given.get("key_padding_mask") is not None:
        padding = nn.functional.pad(given["key_padding_mask"], (0, extra))[:, None, None, :]
        scores = scores.masked_fill(padding, -torch.inf) if padding.dtype == torch.bool else scores + padding
    note(module, scores)
