"""A plain causal transformer: pre-norm, rotary positions, attention with any scale rule."""

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn

from attnscale.errors import SettingError, ShapeError
from attnscale.operator import attention
from attnscale.rules import get_rule
from attnscale.rules.apply import Scale

ROTARY_BASE = 10_000.0  # RoFormer's wavelengths, arXiv:2104.09864
Turns = tuple[Tensor, Tensor]  # cosine and sine by position
HIDDEN = 4  # width of the feed-forward layer / d_model, as in the original Transformer


class CausalTransformer(nn.Module):
    """A language model: tokens (batch, length) -> logits (batch, length, vocabulary).

    Weights are drawn with variance 1/fan_in after an RMSNorm, so q and k start with unit variance, and q·k has a
    spread of √d_k without a scale. `qk_norm` adds an RMSNorm with a learned gain on q and on k.

    >>> model = CausalTransformer(vocabulary=256, d_model=64, layers=2, heads=4, scale="mup")
    >>> model(torch.zeros(1, 5, dtype=torch.int64)).shape
    torch.Size([1, 5, 256])
    """

    def __init__(
        self,
        vocabulary: int,
        d_model: int = 128,
        layers: int = 4,
        heads: int = 4,
        head_dim: int | None = None,
        *,
        scale: Scale = None,
        softcap: float | None = None,
        qk_norm: bool = False,
        context: int = 256,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim or d_model // heads
        self.context = context  # length for training; rotary positions allow any
        self.embedding = nn.Embedding(vocabulary, d_model)
        self.blocks = nn.ModuleList(
            Block(CausalSelfAttention(d_model, heads, head_dim, scale=scale, softcap=softcap, qk_norm=qk_norm))
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(d_model)
        self.head = nn.Linear(d_model, vocabulary, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every matrix with variance 1/fan_in; divide those that write to the residual stream by √(2·layers)."""
        branches = math.sqrt(2 * max(len(self.blocks), 1))
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = module.in_features**-0.5
                nn.init.normal_(module.weight, std=std / branches if name.endswith(".output") else std)
            elif module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # embeddings N(0, 1), gains of one, learned rules at their initial values

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        if tokens.dim() != 2 or not tokens.shape[1] > 0:
            raise ShapeError(f"Expected tokens of shape (batch, length), got {tuple(tokens.shape)}.")
        x = self.embedding(tokens)  # (batch, length, d_model)
        turns = rotary_turns(x.shape[1], self.head_dim, x)
        for block in self.blocks:
            x = block(x, turns)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, attention: "CausalSelfAttention") -> None:
        super().__init__()
        d_model = attention.query.in_features
        self.attention_norm = nn.RMSNorm(d_model)
        self.attention = attention
        self.feed_forward_norm = nn.RMSNorm(d_model)
        self.feed_forward = nn.Sequential(
            OrderedDict(
                hidden=nn.Linear(d_model, HIDDEN * d_model, bias=False),
                activation=nn.GELU(),
                output=nn.Linear(HIDDEN * d_model, d_model, bias=False),
            )
        )

    def forward(self, x: Tensor, turns: Turns | None = None) -> Tensor:
        """Add both branches to the residual stream; `turns` are the rotary positions, computed here by default."""
        x = x + self.attention(self.attention_norm(x), turns)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class CausalSelfAttention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(
        self,
        d_model: int,
        heads: int,
        head_dim: int | None = None,
        *,
        scale: Scale = None,
        softcap: float | None = None,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        if head_dim is None and d_model % heads:
            raise SettingError(f"Expected heads that divide d_model, got {d_model=} and {heads=}; or give head_dim.")
        self.heads, self.head_dim = heads, head_dim or d_model // heads
        if self.head_dim % 2:
            raise SettingError(f"Expected an even head_dim, which rotary positions need, got {self.head_dim}.")
        width = heads * self.head_dim
        self.query = nn.Linear(d_model, width, bias=False)
        self.key = nn.Linear(d_model, width, bias=False)
        self.value = nn.Linear(d_model, width, bias=False)
        self.output = nn.Linear(width, d_model, bias=False)
        self.query_norm = nn.RMSNorm(self.head_dim) if qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(self.head_dim) if qk_norm else nn.Identity()
        if isinstance(scale, str | type):
            scale = get_rule(scale, head_dim=self.head_dim, heads=heads)
        self.scale, self.softcap = scale, softcap  # a rule that learns is a module, and so a submodule here

    def forward(self, x: Tensor, turns: Turns | None = None) -> Tensor:
        """Project, rotate, attend, project back."""
        turns = rotary_turns(x.shape[1], self.head_dim, x) if turns is None else turns
        query = rotate(self.query_norm(self._split(self.query(x))), turns)  # (batch, heads, length, head_dim)
        key = rotate(self.key_norm(self._split(self.key(x))), turns)
        value = self._split(self.value(x))
        heads = attention(query, key, value, is_causal=True, scale=self.scale, softcap=self.softcap)
        out: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(-1, (self.heads, self.head_dim))  # (batch, length, heads, head_dim)
        return split.transpose(1, 2)


def rotate(x: Tensor, turns: Turns | None = None) -> Tensor:
    """Rotate the pairs (x_i, x_{i + d/2}) of the vector at position p by p · base^(−2i/d), as RoFormer does."""
    cos, sin = rotary_turns(x.shape[-2], x.shape[-1], x) if turns is None else turns
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def rotary_turns(length: int, head_dim: int, like: Tensor) -> Turns:
    """Return cosine and sine of the angle of every position and pair, (length, head_dim / 2) each."""
    half = head_dim // 2
    frequency = ROTARY_BASE ** -(torch.arange(half, device=like.device, dtype=torch.float32) / half)
    angle = torch.arange(length, device=like.device, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()
