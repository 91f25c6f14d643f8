"""An entry of the zoo: an attention as somebody writes it, and what watching it must find."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from .bases import Block, SelfAttention, above_diagonal

__all__ = ["Block", "SelfAttention", "above_diagonal", "bug", "correct", "enter"]


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
# For a design that cannot be read, or that has more than one right reading.
UNREAD = dict(scale=None, seen_heads=None, seen_dim=None, causal=None, calls=None, statistics="none")


def enter(name: str, *fields, **more) -> None:
    """Put an entry with these fields into the zoo."""
    assert name not in ENTRIES, name
    ENTRIES[name] = Entry(name, *fields, **more)


def correct(d_model: int, heads: int, *, head_dim=None, kv_heads=None, scale=..., causal=False, softcap=None,
            calls=1, shape=None, inputs=None, seen_heads=..., seen_dim=..., init=None, code=None, train=False,
            statistics="all", tolerance=1e-3, gradients=True, layers=1, step=None, base=None, **members):  # fmt: skip
    """Enter a class as the attention of a residual block: `Block.attention`, built with (d_model, heads, …).

    A function is entered as a class that has it as its only step, and `members` (`config`, `layout`, `kept_as`).
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

    def wrap(design):
        assert members.keys() <= {"config", "layout", "kept_as"}, members
        cls = design if isinstance(design, type) else _with_step(design, step, base, members)

        def make():
            attention = cls(d_model, heads, head_dim=head_dim, kv_heads=kv_heads)
            if init is not None:
                initialise(attention, init)
            return Block(d_model, attention), inputs() if inputs else (torch.randn(shape or (2, 13, d_model)),)

        name = f"{cls.__module__.rsplit('.', 1)[-1]}.{cls.__name__}"
        name += "" if init is None else f"-init{init}"
        paths = ["attention", *(f"attention#{number}" for number in range(2, layers + 1))]
        enter(name, make, dict.fromkeys(paths, expected), code, train, statistics, tolerance, gradients)
        return cls

    return wrap


def _with_step(function, step, base, members):
    name = "".join(word[:1].upper() + word[1:] for word in function.__name__.split("_"))
    bases = base if isinstance(base, tuple) else (base or SelfAttention,)
    return type(name, bases, {step: function, "__module__": function.__module__, **members})


def bug(code: str, d_model: int, heads: int, **expected):
    """Enter a class, or a step, that gets this code."""
    return correct(d_model, heads, code=code, **expected)


def initialise(model: nn.Module, gain: float) -> None:
    """Projections whose outputs have `gain` times the standard deviation of their inputs."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=gain * module.in_features**-0.5)
