"""Attention by one call: F.scaled_dot_product_attention and FlexAttention."""

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .bases import SelfAttention, above_diagonal, note
from .entry import correct


def dense(query, key, scale=None):
    """Return the scores that a fused kernel never shows."""
    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3) if query.dim() > 3 else key
    return query.double() @ key.double().mT * (scale or query.shape[-1] ** -0.5)


def sdpa(owner, query, key, value, mask=None, *, is_causal=False, scale=None, **arguments):
    """Call SDPA, and note the scores that it forms: with a mask of booleans or floats, or a causal one."""
    hidden, bias = above_diagonal(query.shape[-2]) if is_causal else None, 0.0
    if mask is not None:
        hidden, bias = (~mask, 0.0) if mask.dtype == torch.bool else (None, mask)
    note(owner, lambda: dense(query, key, scale) + bias, owner.layout, hidden)
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale, **arguments)


@correct(33, 3, step="attend")
def plain(self, query, key, value):
    return sdpa(self, query, key, value)


@correct(39, 3, causal=True, step="attend")
def causal(self, query, key, value):
    return sdpa(self, query, key, value, is_causal=True)


@correct(35, 5, step="attend")
def padding_mask(self, query, key, value):
    """A boolean mask, True where a key may be seen."""
    real = torch.arange(13) < torch.tensor([[13], [8]])
    return sdpa(self, query, key, value, real[:, None, None, :])


@correct(51, 3, causal=True, step="attend")
def float_causal_mask(self, query, key, value):
    hidden = above_diagonal(query.shape[2])
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    return sdpa(self, query, key, value, mask)


@correct(57, 3)
class FloatBias(SelfAttention):
    """A learned bias handed over as a mask: it is not a scale."""

    def add_parts(self):
        self.bias = torch.nn.Parameter(torch.randn(self.heads, 13, 13))

    def attend(self, query, key, value):
        return sdpa(self, query, key, value, self.bias)


@correct(46, 2, scale=0.3)
class OwnScale(SelfAttention):
    """A scale of one's own, said in an attribute and used."""

    scale = 0.3

    def attend(self, query, key, value):
        return sdpa(self, query, key, value, scale=self.scale)


@correct(69, 3, step="attend")
def scaled_before(self, query, key, value):
    """The query carries the scale, the kernel is told not to."""
    return sdpa(self, query * self.head_dim**-0.5, key, value, scale=1.0)


@correct(66, 6, kv_heads=2, causal=True, step="attend")
def grouped(self, query, key, value):
    return sdpa(self, query, key, value, is_causal=True, enable_gqa=True)


@correct(34, 2, train=True, step="attend")
def with_dropout(self, query, key, value):
    return sdpa(self, query, key, value, dropout_p=0.2 if self.training else 0.0)


@correct(19, 1)
class NoHeadAxis(SelfAttention):
    """One head, (batch, length, dim)."""

    layout = "bqk"

    def forward(self, x):
        return self.out_proj(sdpa(self, self.q_proj(x), self.k_proj(x), self.v_proj(x)))


@correct(33, 3, shape=(2, 5, 7, 33))
class Axial(SelfAttention):
    """Along the last axis of a grid: (batch, rows, heads, length, head_dim)."""

    layout = "bwhqk"

    def forward(self, x):
        heads = (p(x).unflatten(-1, (self.heads, -1)).transpose(2, 3) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(sdpa(self, *heads).transpose(2, 3).flatten(3))


@correct(55, 5, causal=True, shape=(2, 5, 55), step="attend")
def lower_right(self, query, key, value):
    """Five new tokens after eight remembered ones, by torch's own bias class."""
    past = torch.linspace(-1, 1, 2 * self.heads * 8 * self.head_dim).view(2, self.heads, 8, self.head_dim)
    key, value = torch.cat([past, key], 2), torch.cat([past, value], 2)
    note(self, lambda: dense(query, key), hidden=above_diagonal(5, 13))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=causal_lower_right(5, 13))


def causal_mod(batch, head, q, k):
    return q >= k


@correct(64, 4, causal=True, softcap=30.0, gradients=False, step="attend")
def flex_softcap(self, query, key, value):
    """FlexAttention with a soft-cap for a score_mod and a causal block mask."""
    length = query.shape[2]
    note(self, lambda: 30 * torch.tanh(dense(query, key) / 30), hidden=above_diagonal(length))
    blocks = create_block_mask(causal_mod, None, None, length, length, device="cpu")

    def softcap(score, batch, head, q, k):
        return 30.0 * torch.tanh(score / 30.0)

    return flex_attention(query, key, value, score_mod=softcap, block_mask=blocks)


@correct(96, 6, kv_heads=3, scale=0.2, gradients=False)
class FlexAlibi(SelfAttention):
    """FlexAttention with groups, a scale of its own and ALiBi."""

    scale = 0.2

    def attend(self, query, key, value):
        slopes, place = 2.0 ** -torch.arange(1, self.heads + 1), torch.arange(query.shape[2])
        note(self, lambda: dense(query, key, self.scale) + slopes[:, None, None] * (place[None] - place[:, None]))

        def alibi(score, batch, head, q, k):
            return score + slopes[head] * (k - q)

        return flex_attention(query, key, value, score_mod=alibi, scale=self.scale, enable_gqa=True)
