"""Time SDPA with a boolean mask in blocks of rows, relative to the whole mask: `python benchmarks/boolean_mask.py`."""

import statistics
import time

import torch
import torch.nn.functional as F

from attnscale import attention

REPEATS = 9


def seconds(run) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Time both alternately, and print the median ratio with its quartiles for each length."""
    for length in (1024, 2048, 4096):
        query, key, value = (torch.randn(1, 8, length, 64) for _ in range(3))
        mask = torch.rand(length, length) < 0.7

        def whole(qkv=(query, key, value), mask=mask):
            return F.scaled_dot_product_attention(*qkv, attn_mask=mask)

        def blocks(qkv=(query, key, value), mask=mask):
            return attention(*qkv, attn_mask=mask)

        assert torch.equal(whole(), blocks())
        ratios = [seconds(blocks) / seconds(whole) for _ in range(REPEATS)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"length {length}: {middle:.2f}× ({low:.2f}–{high:.2f})")


if __name__ == "__main__":
    main()
