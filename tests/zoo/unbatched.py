"""Layouts without a batch axis, and layouts whose heads stand where most models have the batch."""

import torch
import torch.nn.functional as F

from .entry import SelfAttention, above_diagonal, correct
from .fused import dense
from .recording import note


class Grouped(SelfAttention):
    """Queries (tokens, key heads, group, d), keys and values (tokens, key heads, d)."""

    def parts(self, x):
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        apart = [y.view(len(x), self.kv_heads, self.head_dim) for y in (key, value)]
        return query.view(len(x), self.kv_heads, -1, self.head_dim), *apart


@correct(66, 6, kv_heads=3, causal=True, shape=(13, 66))
class GptOssReference(Grouped):
    """OpenAI's reference of gpt-oss: keys expanded over the group, a sink beside the keys of each head."""

    def add_parts(self):
        self.sinks = torch.nn.Parameter(torch.linspace(-1.0, 0.1, self.heads))

    def forward(self, x):
        query, key, value = self.parts(x)
        tokens, kv_heads, group, _ = query.shape
        key, value = (y[:, :, None, :].expand(-1, -1, group, -1) for y in (key, value))
        sinks = self.sinks.reshape(kv_heads, group, 1, 1).expand(-1, -1, tokens, -1)
        scores = torch.einsum("qhmd,khmd->hmqk", query, key)
        scores *= self.head_dim**-0.5
        scores += torch.triu(scores.new_full((tokens, tokens), -torch.inf), diagonal=1)
        scores = torch.cat([scores, sinks], dim=-1)
        note(self, scores, "ghqk")
        weights = torch.softmax(scores, dim=-1)[..., :-1]
        return self.out_proj(torch.einsum("hmqk,khmd->qhmd", weights, value).reshape(tokens, -1))


@correct(78, 6, kv_heads=2, shape=(13, 78))
class GroupedUnbatched(Grouped):
    """Keys are not expanded."""

    def forward(self, x):
        query, key, value = self.parts(x)
        scores = torch.einsum("qhmd,khd->hmqk", query, key) * self.head_dim**-0.5
        note(self, scores, "ghqk")
        return self.out_proj(torch.einsum("hmqk,khd->qhmd", scores.softmax(-1), value).flatten(1))


@correct(44, 4, shape=(13, 44))
class Unbatched(SelfAttention):
    def forward(self, x):
        query, key, value = (y.view(len(x), self.heads, -1) for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.head_dim**-0.5
        note(self, scores, "hqk")
        return self.out_proj(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1))


@correct(32, 4, kv_heads=2, causal=True, shape=(13, 32))
class GptOssFourHeads(GptOssReference):
    """As few heads as once were taken for two: the axis of key heads was taken for the batch."""


@correct(44, 4, shape=(13, 44))
class UnbatchedHeadsLast(SelfAttention):
    """The heads stand behind the keys, and the softmax runs over the axis between."""

    def forward(self, x):
        query, key, value = (y.view(len(x), self.heads, -1) for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        scores = torch.einsum("qhd,khd->qkh", query, key) * self.head_dim**-0.5
        note(self, scores, "qkh")
        return self.out_proj(torch.einsum("qkh,khd->qhd", scores.softmax(1), value).flatten(1))


@correct(52, 4)
class HeadsLast(SelfAttention):
    """The same with a batch, from (batch, length, heads, d)."""

    def forward(self, x):
        query, key, value = (
            y.unflatten(-1, (self.heads, -1)) for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        scores = torch.einsum("bqhd,bkhd->bqkh", query, key) * self.head_dim**-0.5
        note(self, scores, "bqkh")
        return self.out_proj(torch.einsum("bqkh,bkhd->bqhd", scores.softmax(2), value).flatten(2))


@correct(68, 4)
class LengthBeforeHeads(SelfAttention):
    """(batch, length, heads, d) all the way, heads before queries only in the scores."""

    def forward(self, x):
        query, key, value = (
            y.unflatten(-1, (self.heads, -1)) for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * self.head_dim**-0.5
        note(self, scores)
        return self.out_proj(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value).flatten(2))


@correct(76, 4, shape=(13, 76))
class UnbatchedSDPA(SelfAttention):
    """SDPA on (heads, length, d)."""

    def forward(self, x):
        query, key, value = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        query, key, value = (y.view(len(x), self.heads, -1).transpose(0, 1) for y in (query, key, value))
        note(self, lambda: dense(query[None], key[None]))
        return self.out_proj(F.scaled_dot_product_attention(query, key, value).transpose(0, 1).flatten(1))


@correct(90, 6, kv_heads=2)
class GroupedHeadsFirst(SelfAttention):
    """(key heads, group, batch, …)."""

    def forward(self, x):
        query, key, value = self.project(x)
        query = query.unflatten(1, (self.kv_heads, -1))
        scores = torch.einsum("bgrqd,bgkd->grbqk", query, key) * self.head_dim**-0.5
        note(self, scores.permute(2, 0, 1, 3, 4), "bghqk")
        return self.merge(torch.einsum("grbqk,bgkd->bgrqd", scores.softmax(-1), value).flatten(1, 2))


@correct(102, 6, kv_heads=3, causal=True, shape=(13, 102))
class GroupsAsBatch(Grouped):
    """SDPA with the key heads where most have the batch."""

    def forward(self, x):
        query, key, value = self.parts(x)
        query, key, value = query.permute(1, 2, 0, 3), *(y.transpose(0, 1)[:, None] for y in (key, value))
        note(self, lambda: dense(query, key), "ghqk", hidden=above_diagonal(len(x)))
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out_proj(output.permute(2, 0, 1, 3).flatten(1))


@correct(55, 5, causal=True, shape=(2, 13, 55))
class HeadsBeforeBatch(SelfAttention):
    """SDPA on (heads, batch, …), with a mask for each entry."""

    def forward(self, x):
        query, key, value = (y.transpose(0, 1) for y in self.project(x))
        hidden = above_diagonal(x.shape[1])
        note(self, lambda: dense(query, key).transpose(0, 1), hidden=hidden)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=~hidden.expand(1, 2, -1, -1))
        return self.merge(output.transpose(0, 1))


@correct(65, 5)
class BatchTimesHeads(SelfAttention):
    """SDPA on (batch · heads, 1, …)."""

    def forward(self, x):
        query, key, value = (y.flatten(0, 1).unsqueeze(1) for y in self.project(x))
        note(self, lambda: dense(query, key)[:, 0], "nqk")
        output = F.scaled_dot_product_attention(query, key, value)
        return self.merge(output.unflatten(0, (-1, self.heads)).squeeze(2))
