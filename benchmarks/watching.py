"""Time a watched forward of a 6-layer BERT relative to a plain one: `python benchmarks/watching.py`.

Both are timed alternately. Print the median ratio of successive runs, and fail if it is above its limit.
"""

import argparse
import statistics
import sys
import time

import torch
from transformers import BertConfig, BertModel

import attnscale

LAYERS, LENGTH, HEADS = 6, 512, 12
LIMITS = {768: 1.35, 384: 1.6}  # of BERT base's width and of MiniLM's


def seconds(run) -> float:
    """Return the wall-clock time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ratios(model, batch, rounds: int) -> tuple[list[float], float]:
    """Return the ratio watched / plain of each round, and the median plain time; the first round is a warm-up."""

    def plain():
        model(**batch)

    def watched():
        with attnscale.watch(model):
            model(**batch)

    found, base = [], []
    for turn in range(rounds + 1):
        # the order alternates, so that it does not affect the median
        times = {run: seconds(run) for run in ((plain, watched) if turn % 2 else (watched, plain))}
        found.append(times[watched] / times[plain])
        base.append(times[plain])
    return found[1:], statistics.median(base[1:])


def main() -> None:
    """Print the median ratio with its quartiles for each width and implementation."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=15)
    rounds = arguments.parse_args().rounds
    above = []
    for width, limit in LIMITS.items():
        config = BertConfig(
            hidden_size=width, num_attention_heads=HEADS, num_hidden_layers=LAYERS, intermediate_size=4 * width
        )
        for implementation in ("sdpa", "eager"):
            torch.manual_seed(0)
            model = BertModel._from_config(config, attn_implementation=implementation).eval()
            batch = {"input_ids": torch.randint(0, config.vocab_size, (1, LENGTH))}
            with torch.inference_mode():
                found, plain = ratios(model, batch, rounds)
            low, middle, high = statistics.quantiles(found, n=4)
            print(
                f"{LAYERS} layers of {width}, length {LENGTH}, {implementation}: "
                f"{middle:.3f}× ({low:.3f}–{high:.3f}) of {1e3 * plain:.0f} ms"
            )
            if middle > limit:
                above.append(f"at most {limit}× at width {width}, {implementation}, got {middle:.3f}×")
    if above:
        sys.exit(f"Expected a watched forward to cost {'; '.join(above)}.")


if __name__ == "__main__":
    main()
