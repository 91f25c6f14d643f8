"""Time the exchange of a sampled step between ranks: `python benchmarks/scale.py --ranks 2 8`

Processes on this machine exchange their measurements as Monitor does, through the store that the first process hosts.
Also print the bytes of a message and of a logged record, and the time to write and to read a record.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from attnscale import score_stats
from attnscale.declared import Declared
from attnscale.train import JsonLines, Record, read_log
from attnscale.train.ranks import Ranks
from attnscale.train.tally import PendingTallies, Tallies, from_bytes, merge, records, to_bytes, whole_layers
from attnscale.watching.gradients import GradientLengths
from attnscale.watching.layer import Layer

REPEATS = 10


def tallies(layers: int, heads: int) -> Tallies:
    """Return the tallies of one rank, equal for all layers."""
    query, key = torch.randn(1, heads, 64, 16), torch.randn(1, heads, 64, 16)
    ones = torch.ones(heads, dtype=torch.float64)
    layer = Layer(
        name="", kind="sdpa", heads=heads, kv_heads=heads, head_dim=16, model_dims=(), query_len=64, key_len=64,
        causal=False, softcap=None, stats=score_stats(query, key), scales=ones, query_norm=ones, key_norm=ones,
        declared=Declared(), gradients=(GradientLengths(ones, ones),),
    )  # fmt: skip
    ((_, tally),) = PendingTallies({"": layer}, 0).tallies().items()
    return {(f"model.layers.{index}.self_attn", 0, heads): tally for index in range(layers)}


def merged(payloads: list[bytes]) -> bytes:
    """Merge messages as Monitor does."""
    return to_bytes(merge(map(from_bytes, payloads)))


def exchange(rank: int, world: int, store: str, layers: int, heads: int, results: Any) -> None:
    """Exchange messages with the other ranks, and report the seconds each exchange took."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    own, ranks = tallies(layers, heads), Ranks(None, None, 60.0, print)
    for step in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        assert ranks.merged(f"step {step}", own, (None, None)).ranks == world
        results.put((rank, time.perf_counter() - start))
    dist.barrier()


def exchange_seconds(world: int, layers: int, heads: int, port: int) -> float:
    """Return the median over exchanges of the time until the last rank has the answer."""
    results = mp.get_context("spawn").SimpleQueue()
    mp.start_processes(
        exchange, (world, f"tcp://127.0.0.1:{port}", layers, heads, results), nprocs=world, start_method="spawn"
    )
    seconds: dict[int, list[float]] = {}
    while not results.empty():
        rank, taken = results.get()
        seconds.setdefault(rank, []).append(taken)
    return statistics.median(map(max, zip(*seconds.values(), strict=True)))


def seconds_of(run: Callable[[], object]) -> float:
    """Return the median time of a call."""
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    """Print sizes and times."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--ranks", type=int, nargs="*", default=[2, 3, 8])
    arguments.add_argument("--layers", type=int, default=48)
    arguments.add_argument("--heads", type=int, default=32)
    arguments.add_argument("--port", type=int, default=29_571)
    given = arguments.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    whole = tallies(given.layers, given.heads)
    message = to_bytes(whole)
    record = Record(10**6, time.time(), records(whole_layers(whole)))
    found: dict[str, float] = {
        "message_bytes": len(message),
        "merging_two_seconds": seconds_of(lambda: merged([message, message])),
        "record_bytes": len(record.to_line()),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scores.jsonl"
        sink = JsonLines(path)
        found["writing_a_record_seconds"] = seconds_of(lambda: sink(record))
        found["reading_a_record_seconds"] = seconds_of(lambda: read_log(path)) / REPEATS
    for index, world in enumerate(given.ranks):
        seconds = exchange_seconds(world, given.layers, given.heads, given.port + index)
        found[f"exchange_of_{world}_ranks_seconds"] = seconds
    print(json.dumps({name: float(f"{value:.3g}") for name, value in found.items()}, indent=1))


if __name__ == "__main__":
    main()
