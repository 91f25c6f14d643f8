"""Time statistics with common masks: `python benchmarks/masks.py`.

Each timing is paired with one of plain SDPA with the same mask, alternately before and after it; every statistic is
read. SDPA has no soft-cap, so its reference is attnscale's own attention without statistics.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnscale import attention, attention_with_stats
from attnscale.bench.costs import CALLS, clocks
from attnscale.measure.statistics import of_scores

SHAPES = {"cuda": [(8, 12, 1024, 64), (4, 16, 4096, 128)], "cpu": [(2, 8, 512, 64)]}
ROUNDS = 7


def masks(batch: int, length: int, device: str) -> dict[str, dict[str, Any]]:
    """Return the arguments of attention, by the name of the mask."""
    at = torch.arange(length, device=device)
    ahead = at[:, None] - at
    lengths = torch.linspace(length // 2, length, batch, device=device)
    document = at * 4 // length
    window = (ahead >= 0) & (ahead < length // 8)
    return {
        "key padding": {"attn_mask": (at < lengths[:, None])[:, None, None, :]},
        "soft-cap of 30, causal": {"softcap": 30.0, "is_causal": True},
        "causal, window of an eighth": {"attn_mask": window},
        "causal, four documents in a row": {"attn_mask": (ahead >= 0) & (document[:, None] == document)},
    }


def read(rows: int | None, options: dict[str, Any], qkv: list[Tensor]) -> None:
    """Run attention, and read every statistic."""
    _, stats = attention_with_stats(*qkv, rows=rows, **options)
    for name in of_scores():
        getattr(stats, name)


def plain(options: dict[str, Any], qkv: list[Tensor]) -> None:
    """Run attention without statistics."""
    (attention if "softcap" in options else F.scaled_dot_product_attention)(*qkv, **options)


def ratio(step: Callable[[], None], base: Callable[[], None], device: str) -> tuple[float, float]:
    """Return the median milliseconds of the base, and the ratio of the step to it."""
    own, reference = clocks(step, device)[CALLS], clocks(base, device)[CALLS]
    pairs = [(own(), reference()) if turn % 2 else (reference(), own())[::-1] for turn in range(ROUNDS)]
    return statistics.median(b for _, b in pairs), statistics.median(a / b for a, b in pairs)


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    print("| (batch, heads, length, head dim) | mask | plain, ms | every row, read | 64 rows, read |")
    print("|---|---|---|---|---|")
    for batch, heads, length, head_dim in SHAPES[device]:
        qkv = [torch.randn(batch, heads, length, head_dim, device=device, dtype=dtype) for _ in range(3)]
        for name, options in masks(batch, length, device).items():
            base = partial(plain, options, qkv)
            found = []
            for rows in (None, 64):
                step = partial(read, rows, options, qkv)
                step()
                base()
                found.append(ratio(step, base, device))
            (milliseconds, exact), (_, sampled) = found
            shape = f"({batch}, {heads}, {length}, {head_dim})"
            print(f"| {shape} | {name} | {milliseconds:.3g} | {exact:.2f} | {sampled:.2f} |", flush=True)


if __name__ == "__main__":
    main()
