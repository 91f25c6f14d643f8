"""An entry of the zoo: an attention as somebody writes it, and what watching it must find."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Expected:
    """What is known of one attention; None where there is no one right answer."""

    heads: int | None
    head_dim: int | None
    scale: float | None
    kv_heads: int | None
    causal: bool | None = False
    softcap: float | None = None
    calls: int | None = 1


@dataclass(frozen=True)
class Entry:
    """A model, its inputs, what each of its layers must show, and the codes an audit must give it (none: correct)."""

    name: str
    make: Callable[[], tuple[nn.Module, tuple]]
    layers: dict[str, Expected]
    code: str | None = None
    train: bool = False
    statistics: str = "all"  # "shape" where a row's scores are known up to a constant only, "none" where unknown
    tolerance: float = 1e-3
    gradients: bool = True  # False where there is no backward pass: on a CPU, or through what was overwritten

    def build(self, seed: int = 0) -> tuple[nn.Module, tuple]:
        """The model and its inputs, the same every time."""
        torch.manual_seed(zlib.crc32(self.name.encode()) + seed)
        model, inputs = self.make()
        return model.train(self.train), inputs


ENTRIES: dict[str, Entry] = {}
# Of a design that cannot be read, or of which there is more than one right reading.
UNREAD = dict(scale=None, seen_heads=None, seen_dim=None, causal=None, calls=None, statistics="none")


def enter(entry: Entry) -> None:
    """Put an entry into the zoo."""
    assert entry.name not in ENTRIES, entry.name
    ENTRIES[entry.name] = entry


def correct(d_model: int, heads: int, *, head_dim=None, kv_heads=None, scale=..., causal=False, softcap=None,
            calls=1, shape=None, inputs=None, seen_heads=..., seen_dim=..., init=None, code=None, train=False,
            statistics="all", tolerance=1e-3, gradients=True, layers=1):  # fmt: skip
    """Enter the class as the attention of a residual block: `Block.attention`, built with (d_model, heads, …).

    The scale is 1/√d_k where nothing else is said, and heads and head_dim are seen as they are built. One line that
    attends by several rows of its parameters shows as many layers.
    """
    head_dim = head_dim or d_model // heads
    expected = Expected(
        heads=heads if seen_heads is ... else seen_heads,
        head_dim=head_dim if seen_dim is ... else seen_dim,
        scale=head_dim**-0.5 if scale is ... else scale,
        kv_heads=kv_heads or (heads if seen_heads is ... else seen_heads),
        causal=causal,
        softcap=softcap,
        calls=calls,
    )

    def wrap(cls):
        def make():
            attention = cls(d_model, heads, head_dim=head_dim, kv_heads=kv_heads)
            if init is not None:
                initialise(attention, init)
            return Block(d_model, attention), inputs() if inputs else (torch.randn(shape or (2, 13, d_model)),)

        name = f"{cls.__module__.rsplit('.', 1)[-1]}.{cls.__name__}"
        name += "" if init is None else f"-init{init}"
        paths = ["attention", *(f"attention#{number}" for number in range(2, layers + 1))]
        enter(Entry(name, make, dict.fromkeys(paths, expected), code, train, statistics, tolerance, gradients))
        return cls

    return wrap


def bug(code: str, d_model: int, heads: int, **expected):
    """Enter the class as one that gets this code."""
    return correct(d_model, heads, code=code, **expected)


def initialise(model: nn.Module, gain: float) -> None:
    """Projections whose outputs have `gain` times the standard deviation of their inputs."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=gain * module.in_features**-0.5)


class Block(nn.Module):
    """x + attention(norm(x)), what nearly every attention lives in."""

    def __init__(self, d_model: int, attention: nn.Module):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.attention = attention

    def forward(self, x: Tensor, *rest) -> Tensor:
        return x + self.attention(self.norm(x), *rest)


class SelfAttention(nn.Module):
    """The projections most attentions have, and the usual way to split and to merge heads."""

    def __init__(self, d_model: int, heads: int, head_dim: int | None = None, kv_heads: int | None = None):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.head_dim = head_dim or d_model // heads
        self.q_proj = nn.Linear(d_model, self.heads * self.head_dim)
        self.k_proj = nn.Linear(d_model, self.kv_heads * self.head_dim)
        self.v_proj = nn.Linear(d_model, self.kv_heads * self.head_dim)
        self.out_proj = nn.Linear(self.heads * self.head_dim, d_model)

    def split(self, x: Tensor, heads: int | None = None) -> Tensor:
        """(batch, length, heads · head_dim) to (batch, heads, length, head_dim)."""
        batch, length, _ = x.shape
        return x.view(batch, length, heads or self.heads, self.head_dim).transpose(1, 2)

    def merge(self, x: Tensor) -> Tensor:
        """(batch, heads, length, head_dim) back to (batch, length, d_model)."""
        return self.out_proj(x.transpose(1, 2).flatten(2))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each (batch, heads, length, head_dim)."""
        return (
            self.split(self.q_proj(x)),
            self.split(self.k_proj(x), self.kv_heads),
            self.split(self.v_proj(x), self.kv_heads),
        )


def above_diagonal(q_len: int, kv_len: int | None = None) -> Tensor:
    """True where a causal attention must not look: keys after the query, the last query seeing every key."""
    kv_len = kv_len or q_len
    return torch.ones(q_len, kv_len, dtype=torch.bool).triu(1 + kv_len - q_len)
