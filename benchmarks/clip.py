"""Time clip_qk_ for thousands of heads, all of them clipped: `python benchmarks/clip.py`."""

import time

import torch
from torch import nn

import attnscale

LAYERS, HEADS, ROUNDS = 100, 64, 5


def main() -> None:
    """Print the number of clipped heads, and the shortest wall-clock and processor time of ROUNDS rounds."""
    found = []
    for seed in range(ROUNDS):
        torch.manual_seed(seed)
        model = nn.ModuleList(nn.MultiheadAttention(2 * HEADS, HEADS, batch_first=True) for _ in range(LAYERS))
        x = torch.randn(1, 3, 2 * HEADS)
        with torch.no_grad(), attnscale.watch(model, rows=None) as seen:
            for layer in model:
                layer(x, x, x)
        clock, processor = time.perf_counter(), time.process_time()
        report = attnscale.clip_qk_(model, seen, threshold=1e-4)
        found.append((time.perf_counter() - clock, time.process_time() - processor, len(report.heads)))
    clock, processor = (min(each[which] for each in found) for which in (0, 1))
    print(f"{min(each[2] for each in found)} of {LAYERS * HEADS} heads: {clock:.2f} s, processor {processor:.2f} s")


if __name__ == "__main__":
    main()
