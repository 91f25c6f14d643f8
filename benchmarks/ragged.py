"""What a ragged batch costs: `python benchmarks/ragged.py`.

Packed tokens beside a plain batch of as many tokens, whose sequences are as long as the ragged ones are on average for
the work of their scores; beside the same sequences padded with a mask; and with statistics, every one of them read.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from attnscale import attention_varlen, attention_varlen_with_stats
from attnscale.bench.clocks import CALLS, clocks
from attnscale.measure.statistics import of_scores

SHAPES = {"cuda": [(16, 16, 4096, 128), (64, 12, 1024, 64)], "cpu": [(8, 8, 512, 64)]}  # sequences, heads, longest, d_k
ROUNDS = 7


def lengths_of(sequences: int, longest: int) -> list[int]:
    """Evenly spread, the shortest a sixteenth of the longest."""
    return torch.linspace(longest / 16, longest, sequences).round().int().tolist()


def packed(starts: Tensor, longest: int, qkv: list[Tensor]) -> None:
    """The ragged batch without statistics."""
    attention_varlen(*qkv, starts, None, longest, longest, is_causal=True)


def read(starts: Tensor, longest: int, rows: int | None, qkv: list[Tensor]) -> None:
    """The ragged batch with every statistic read."""
    _, stats = attention_varlen_with_stats(*qkv, starts, None, longest, longest, is_causal=True, rows=rows)
    for name in of_scores():
        getattr(stats, name)


def ratio(step: Callable[[], object], base: Callable[[], object], device: str) -> tuple[float, float]:
    """Milliseconds of the base, and how many times that the step takes; in turns."""
    step()
    base()
    own, reference = clocks(step, device)[CALLS], clocks(base, device)[CALLS]
    pairs = [(own(), reference()) if turn % 2 else (reference(), own())[::-1] for turn in range(ROUNDS)]
    return statistics.median(b for _, b in pairs), statistics.median(a / b for a, b in pairs)


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    print("| (sequences, heads, longest, head dim) | plain, ms | packed | padded | every row, read | 64 rows, read |")
    print("|---|---|---|---|---|---|")
    for sequences, heads, longest, head_dim in SHAPES[device]:
        lengths = lengths_of(sequences, longest)
        total, alike = sum(lengths), round(sum(length**2 for length in lengths) / sum(lengths))
        starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        qkv = [torch.randn(total, heads, head_dim, device=device, dtype=dtype) for _ in range(3)]
        even = [torch.randn(math.ceil(total / alike), heads, alike, head_dim, device=device, dtype=dtype)] * 3
        wide = [torch.randn(sequences, heads, longest, head_dim, device=device, dtype=dtype)] * 3
        at = torch.arange(longest, device=device)
        inside = at < torch.tensor(lengths, device=device).unsqueeze(-1)
        mask = inside[:, None, None, :] & (at.unsqueeze(-1) >= at)
        base = partial(F.scaled_dot_product_attention, *even, is_causal=True)
        steps: list[Callable[[], object]] = [
            partial(packed, starts, longest, qkv),
            partial(F.scaled_dot_product_attention, *wide, mask),
            partial(read, starts, longest, None, qkv),
            partial(read, starts, longest, 64, qkv),
        ]
        found = [ratio(step, base, device) for step in steps]
        shape = f"({sequences}, {heads}, {longest}, {head_dim})"
        print(f"| {shape} | {found[0][0]:.3g} | " + " | ".join(f"{times:.2f}" for _, times in found) + " |", flush=True)


if __name__ == "__main__":
    main()
