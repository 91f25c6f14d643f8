"""Layouts without a batch axis, and layouts whose heads stand where most models have the batch."""

import torch
import torch.nn.functional as F

from .bases import HeadsLast as LengthFirst
from .bases import above_diagonal, note
from .entry import correct
from .fused import dense, sdpa


class Grouped(LengthFirst):
    """Queries (tokens, key heads, group, d), keys and values (tokens, key heads, d)."""

    def project(self, x):
        apart = [p(x).view(len(x), self.kv_heads, self.head_dim) for p in (self.k_proj, self.v_proj)]
        return self.q_proj(x).view(len(x), self.kv_heads, -1, self.head_dim), *apart

    def merge(self, x):
        return self.out_proj(x.flatten(1))


@correct(66, 6, kv_heads=3, causal=True, shape=(13, 66))
class GptOssReference(Grouped):
    """OpenAI's reference of gpt-oss: keys expanded over the group, a sink beside the keys of each head."""

    def add_parts(self):
        self.sinks = torch.nn.Parameter(torch.linspace(-1.0, 0.1, self.heads))

    def attend(self, query, key, value):
        tokens, kv_heads, group, _ = query.shape
        key, value = (y[:, :, None, :].expand(-1, -1, group, -1) for y in (key, value))
        sinks = self.sinks.reshape(kv_heads, group, 1, 1).expand(-1, -1, tokens, -1)
        scores = torch.einsum("qhmd,khmd->hmqk", query, key)
        scores *= self.head_dim**-0.5
        scores += torch.triu(scores.new_full((tokens, tokens), -torch.inf), diagonal=1)
        scores = torch.cat([scores, sinks], dim=-1)
        note(self, scores, "ghqk")
        weights = torch.softmax(scores, dim=-1)[..., :-1]
        return torch.einsum("hmqk,khmd->qhmd", weights, value)


@correct(78, 6, kv_heads=2, shape=(13, 78))
class GroupedUnbatched(Grouped):
    """Keys are not expanded."""

    scored, mixed, layout = "qhmd,khd->hmqk", "hmqk,khd->qhmd", "ghqk"


@correct(44, 4, shape=(13, 44))
class Unbatched(LengthFirst):
    scored, mixed, layout = "qhd,khd->hqk", "hqk,khd->qhd", "hqk"


@correct(32, 4, kv_heads=2, causal=True, shape=(13, 32))
class GptOssFourHeads(GptOssReference):
    """As few heads as once were taken for two: the axis of key heads was taken for the batch."""


@correct(44, 4, shape=(13, 44))
class UnbatchedHeadsLast(LengthFirst):
    """The heads stand behind the keys, and the softmax runs over the axis between."""

    scored, mixed, axis, layout = "qhd,khd->qkh", "qkh,khd->qhd", 1, "qkh"


@correct(52, 4)
class HeadsLast(LengthFirst):
    """With a batch, from (batch, length, heads, d)."""

    scored, mixed, axis, layout = "bqhd,bkhd->bqkh", "bqkh,bkhd->bqhd", 2, "bqkh"


@correct(68, 4)
class LengthBeforeHeads(LengthFirst):
    """(batch, length, heads, d) all the way, heads before queries only in the scores."""


@correct(76, 4, shape=(13, 76))
class UnbatchedSDPA(LengthFirst):
    """SDPA on (heads, length, d)."""

    def attend(self, *heads):
        query, key, value = (y.transpose(0, 1) for y in heads)
        note(self, lambda: dense(query[None], key[None]))
        return F.scaled_dot_product_attention(query, key, value).transpose(0, 1)


@correct(90, 6, kv_heads=2, step="attend")
def grouped_heads_first(self, query, key, value):
    """(key heads, group, batch, …)."""
    query = query.unflatten(1, (self.kv_heads, -1))
    scores = torch.einsum("bgrqd,bgkd->grbqk", query, key) * self.head_dim**-0.5
    note(self, scores, "ghbqk")
    return torch.einsum("grbqk,bgkd->bgrqd", scores.softmax(-1), value).flatten(1, 2)


@correct(102, 6, kv_heads=3, causal=True, shape=(13, 102), step="attend", base=Grouped, layout="ghqk")
def groups_as_batch(self, query, *shared):
    """SDPA with the key heads where most have the batch."""
    query, key, value = query.permute(1, 2, 0, 3), *(y.transpose(0, 1)[:, None] for y in shared)
    return sdpa(self, query, key, value, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)


@correct(55, 5, causal=True, shape=(2, 13, 55), step="attend", layout="hbqk")
def heads_before_batch(self, *heads):
    """SDPA on (heads, batch, …), with a mask for each entry."""
    query, key, value = (y.transpose(0, 1) for y in heads)
    return sdpa(self, query, key, value, ~above_diagonal(query.shape[2]).expand(1, 2, -1, -1)).transpose(0, 1)


@correct(65, 5, step="attend")
def batch_times_heads(self, *heads):
    """SDPA on (batch · heads, 1, …)."""
    query, key, value = (y.flatten(0, 1).unsqueeze(1) for y in heads)
    note(self, lambda: dense(query, key)[:, 0], "nqk")
    return F.scaled_dot_product_attention(query, key, value).unflatten(0, (-1, self.heads)).squeeze(2)
