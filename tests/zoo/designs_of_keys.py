"""Designs whose keys are few, shared, kept or made otherwise; all of them are right.

What cannot be read of them may be said in a note; none gets a warning or an error.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .bases import Block, Causal, Divided, Einsum, SelfAttention, above_diagonal, note
from .entry import UNREAD, Expected, correct, enter


@correct(57, 3, shape=(2, 20, 57), layers=3, statistics="none")
class Nystrom(SelfAttention):
    """Nyström attention: three softmaxes about five landmarks, and the pseudo-inverse of one of them."""

    landmarks = 5

    def attend(self, query, key, value):
        query = query * self.head_dim**-0.25
        key = key * self.head_dim**-0.25
        q_marks, k_marks = (y.unflatten(2, (self.landmarks, -1)).mean(3) for y in (query, key))
        first = (query @ k_marks.mT).softmax(-1)
        middle = (q_marks @ k_marks.mT).softmax(-1)
        last = (q_marks @ key.mT).softmax(-1)
        return (first @ self.inverse(middle)) @ (last @ value)

    def inverse(self, matrix, steps=6):
        eye = torch.eye(matrix.shape[-1])
        found = matrix.mT / matrix.sum(-2).max()
        for _ in range(steps):
            both = matrix @ found
            found = 0.25 * found @ (13 * eye - both @ (15 * eye - both @ (7 * eye - both)))
        return found


@correct(35, 5, shape=(2, 20, 35), **UNREAD, step="attend", base=Nystrom)
def nystrom_scaled_query(self, query, key, value):
    """The reference implementation's: the query alone is scaled, an exact pseudo-inverse."""
    query = query * self.head_dim**-0.5
    q_marks, k_marks = (y.unflatten(2, (self.landmarks, -1)).mean(3) for y in (query, key))
    first, middle, last = (
        torch.einsum("...id,...jd->...ij", *pair).softmax(-1)
        for pair in ((query, k_marks), (q_marks, k_marks), (q_marks, key))
    )
    return first @ torch.linalg.pinv(middle) @ (last @ value)


@correct(68, 4, statistics="none")
class MemoryKeys(Divided):
    """Learned keys and values beside those of the tokens."""

    def add_parts(self):
        self.memory = nn.Parameter(torch.randn(2, 1, self.heads, 3, self.head_dim))

    def attend(self, query, *kept):
        key, value = (
            torch.cat([mine.expand(len(query), -1, -1, -1), y], 2) for mine, y in zip(self.memory, kept, strict=True)
        )
        return super().attend(query, key, value)


class Attend(Divided, Einsum):
    """From one set to another."""

    def forward(self, x, other):
        query = self.split(self.q_proj(x))
        key, value = self.split(self.k_proj(other)), self.split(self.v_proj(other))
        return self.merge(self.attend(query, key, value))


class InducedSet(nn.Module):
    """Set transformer's: to a few learned points and back; then pooled by a learned seed."""

    def __init__(self):
        super().__init__()
        self.points, self.seed = nn.Parameter(torch.randn(1, 4, 39)), nn.Parameter(torch.randn(1, 1, 39))
        self.first, self.second, self.pool = (Attend(39, 3) for _ in range(3))

    def forward(self, x):
        hidden = self.first(self.points.expand(x.shape[0], -1, -1), x)
        x = x + self.second(x, hidden)
        return self.pool(self.seed.expand(x.shape[0], -1, -1), x)


enter(
    "designs_of_keys.InducedSet",
    lambda: (InducedSet(), (torch.randn(2, 13, 39),)),
    {name: Expected(3, 13, 13**-0.5, 3) for name in ("first", "second", "pool")},
)


class Linformer(Divided):
    """Keys and values projected to six positions along the length."""

    def add_parts(self):
        self.along = nn.Parameter(torch.randn(2, 20, 6) / 20**0.5)

    def project(self, x):
        query = self.split(self.q_proj(x))
        key = self.split(torch.einsum("bnd,nk->bkd", self.k_proj(x), self.along[0]))
        return query, key, self.split(torch.einsum("bnd,nk->bkd", self.v_proj(x), self.along[1]))


enter(
    "designs_of_keys.Linformer",
    lambda: (Block(55, Linformer(55, 5)), (torch.randn(2, 20, 55),)),
    {"attention": Expected(5, 11, 11**-0.5, None)},
    statistics="none",
)


@correct(42, 3, statistics="none", causal=None, calls=None)
class SharedQueriesAndKeys(SelfAttention):
    """Reformer's: the key is the query at unit length, and no token looks at itself."""

    def project(self, x):
        query, value = self.split(self.q_proj(x)), self.split(self.v_proj(x))
        return query, F.normalize(query, dim=-1), value

    def adjust(self, scores):
        return scores.masked_fill(torch.eye(scores.shape[-1], dtype=torch.bool), -5e4)


@correct(68, 4, kv_heads=2, statistics="none")
class TiledKeysAndValues(Divided):
    """Both in whole copies side by side: another order than Llama's, and the same for both."""

    def attend(self, query, *shared):
        return super().attend(query, *(y.repeat(1, self.heads // self.kv_heads, 1, 1) for y in shared))


@correct(36, 3, statistics="none", causal=True, calls=2)
class Recurrent(Divided, Causal):
    """Transformer-XL's: the second half sees the first as a memory through which no gradient goes."""

    def forward(self, x):
        memory, mixed = None, []
        for part in x.split(7, dim=1):
            query = self.split(self.q_proj(part))
            seen = part if memory is None else torch.cat([memory.detach(), part], 1)
            key, value = self.split(self.k_proj(seen)), self.split(self.v_proj(seen))
            mixed.append(self.merge(self.attend(query, key, value)))
            memory = part
        return torch.cat(mixed, 1)


@correct(66, 3, head_dim=24, scale=16**-0.5, kv_heads=1, causal=True)
class AbsorbedKeys(nn.Module):
    """DeepSeek's latent attention as it decodes: keys are what they are projected from, and queries do the projecting.

    The product runs over 24 features, and the scale is that of the 16 that a head had before.
    """

    def __init__(self, d_model, heads, head_dim, kv_heads, rank=16):
        super().__init__()
        self.heads, self.rank = heads, rank
        self.query, self.latent = nn.Linear(d_model, heads * rank), nn.Linear(d_model, head_dim)
        self.keys = nn.Parameter(torch.randn(heads, rank, head_dim) * head_dim**-0.5)
        self.values = nn.Parameter(torch.randn(heads, rank, head_dim) * head_dim**-0.5)
        self.out_proj = nn.Linear(heads * rank, d_model)

    def forward(self, x):
        latent, query = self.latent(x), self.query(x).unflatten(-1, (self.heads, self.rank))
        absorbed = torch.einsum("bihr,hrc->bhic", query, self.keys)
        scores = torch.einsum("bhic,bjc->bhij", absorbed, latent) * self.rank**-0.5
        scores = scores.masked_fill(above_diagonal(x.shape[1]), -torch.inf)
        note(self, scores)
        attended = torch.einsum("bhij,bjc->bhic", scores.softmax(-1), latent)
        return self.out_proj(torch.einsum("bhic,hrc->bihr", attended, self.values).flatten(2))


@correct(64, 4, **UNREAD)
class KeysOfTwoTokens(Divided, Causal):
    """Each key is a learned mix of its token's and of the one before, as in shifted key-value attention.

    At the start both shares are a half, and half of 1/√16 is 1/√64, the model's width.
    """

    def add_parts(self):
        self.share = nn.Parameter(torch.tensor(0.5))

    def prepare(self, query, key):
        return query, self.share * key + (1 - self.share) * F.pad(key, (0, 0, 1, -1))
