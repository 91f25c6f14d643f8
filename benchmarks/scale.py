"""What a sampled step costs on many ranks, simulated from measured constants: `python benchmarks/scale.py`

Measured here: bytes of a packed layer and of a logged record, the time of merging two messages, of packing and of
writing a record. Given: the latency and bandwidth of a link. The tree is then walked: a rank receives its children's
messages one after the other, merges, and sends one up; the merged message comes down the same way.
"""

import argparse
import json
import time

import torch

from attnscale import score_stats
from attnscale.declared import Declared
from attnscale.train.numbers import records
from attnscale.train.record import Record
from attnscale.train.tally import from_bytes, merge, seen_tallies, to_bytes, whole_layers
from attnscale.watching.gradients import GradientSquares
from attnscale.watching.layer import Layer

STEP_SECONDS, MONTH = 5.0, 30 * 86_400.0


def tallies(layers: int, heads: int) -> dict:
    """What one rank saw: every layer like this one."""
    query, key = torch.randn(1, heads, 64, 16), torch.randn(1, heads, 64, 16)
    ones = torch.ones(heads, dtype=torch.float64)
    layer = Layer(
        name="", kind="sdpa", heads=heads, kv_heads=heads, head_dim=16, model_dims=(), query_len=64, key_len=64,
        causal=False, softcap=None, stats=score_stats(query, key), scales=ones, query_norm=ones, key_norm=ones,
        declared=Declared(), gradients=(GradientSquares(ones, ones),),
    )  # fmt: skip
    ((_, tally),) = seen_tallies({"": layer}, 0).items()
    return {(f"model.layers.{index}.self_attn", 0, heads): tally for index in range(layers)}


def seconds(run, repeats: int = 5) -> float:
    """The best of a few."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def tree_seconds(ranks: int, hop: float, merging: float) -> float:
    """When rank 0 has merged all, and when the last rank has the answer: up and down a binomial tree."""
    done: dict[int, float] = {}

    def ready(rank: int) -> float:
        if rank not in done:
            at, distance = 0.0, 1
            while rank + distance < ranks and not rank & distance:
                at = max(at, ready(rank + distance) + hop) + merging
                distance *= 2
            done[rank] = at
        return done[rank]

    def reached(rank: int, at: float) -> float:
        last, distance = at, 1
        while rank + distance < ranks and not rank & distance:
            distance *= 2
        distance //= 2
        while distance:  # the largest branch first
            at += hop
            last = max(last, reached(rank + distance, at))
            distance //= 2
        return last

    return reached(0, ready(0))


def main() -> None:
    """Print the costs."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--ranks", type=int, default=16_384)
    arguments.add_argument("--layers", type=int, default=126)
    arguments.add_argument("--heads", type=int, default=128)
    arguments.add_argument("--tensor-parallel", type=int, default=8)
    arguments.add_argument("--latency", type=float, default=50e-6, help="of a message over TCP, seconds")
    arguments.add_argument("--bandwidth", type=float, default=1.25e9, help="of a link, bytes a second: 10 Gbit/s")
    arguments.add_argument("--every", type=int, default=50)
    given = arguments.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    own = tallies(given.layers, given.heads // given.tensor_parallel)
    whole = tallies(given.layers, given.heads)
    part, full = to_bytes(own), to_bytes(whole)
    packing = seconds(lambda: to_bytes(own))
    merging = seconds(lambda: to_bytes(merge([from_bytes(full), from_bytes(full)])))
    record = Record(10**6, time.time(), records(whole_layers(whole)))
    line = json.dumps(record.to_dict(), separators=(",", ":"))
    writing = seconds(lambda: json.dumps(record.to_dict(), separators=(",", ":")), 3)
    hop = given.latency + len(full) / given.bandwidth
    found = {
        "message_of_a_rank_bytes": len(part),
        "merged_message_bytes": len(full),
        "gathered_bytes_a_rank": len(part) * given.ranks,
        "tree_bytes_a_rank_at_most": 2 * len(full) * (given.ranks - 1).bit_length(),
        "packing_seconds": packing,
        "merging_seconds": merging,
        "exchange_seconds": packing + tree_seconds(given.ranks, hop, merging),
        "record_bytes": len(line),
        "record_seconds": writing,
        "records_a_month": round(MONTH / STEP_SECONDS / given.every),
        "month_bytes": len(line) * round(MONTH / STEP_SECONDS / given.every),
    }
    for name, value in found.items():
        print(f"{name}: {value:,.4g}" if isinstance(value, float) else f"{name}: {value:,}")


if __name__ == "__main__":
    main()
