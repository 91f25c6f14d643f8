"""Logs for tests: records, a large log, and processes that write."""

import itertools
import random
import time

from attnscale.measure.statistics import logged
from attnscale.train import JsonLines, LayerRecord, Record, read_log
from tests.ranks import processes

LAYERS, HEADS = 12, 12


def record(step, largest=1.0, **more):
    numbers = {"max": [largest, 0.5], "entropy_ratio": [1 / (1 + largest), 0.9], "spread": [1.0, float("nan")]}
    numbers["total_spread"] = [2.0, float("nan")]
    return Record(step, 1e9 + step, {"layer": LayerRecord(7, numbers)}, **{"run": "one", **more})


def large_log(path, size):
    """Write a log of about this many bytes: a run of GPT-2-small's shape, some 20 kB a record."""
    layers = {
        f"blocks.{layer}.attention": LayerRecord(
            64 * HEADS, {name: [round(0.1 + 0.0137 * (layer + head), 4) for head in range(HEADS)] for name in logged()}
        )
        for layer in range(LAYERS)
    }
    before, after = Record(987654321, 1e9, layers, run="large", part="one").to_line().split(b"987654321")
    with path.open("wb") as file:
        for number in range(-(-size // len(before + after))):
            file.write(before + str(50 * number).encode() + after)
    return path


def write_forever(path, first, limit, said):
    """Write records and say so, until killed."""
    sink = JsonLines(path, limit)
    for step in itertools.count(first):
        sink(record(step))
        said.send(step)


def write_many(path, run, count, limit):
    sink = JsonLines(path, limit)
    for step in range(count):
        sink(record(step, run=run))


def killed_writers(path, times, limit=20_000):
    """Kill a process that writes, again and again; return how often no record that it had said it wrote was missing."""
    moments, first, survived = random.Random(0), 0, 0
    for _ in range(times):
        listening, saying = processes().Pipe(duplex=False)
        writer = processes().Process(target=write_forever, args=(path, first, limit, saying))
        writer.start()
        saying.close()
        last = listening.recv()
        deadline = time.monotonic() + moments.uniform(0.0, 0.05)
        while time.monotonic() < deadline:
            last = listening.recv()
        writer.kill()
        writer.join()
        try:
            while True:
                last = listening.recv()
        except EOFError:
            listening.close()
        steps = {found.step for found in read_log(path).records}
        survived += steps.issuperset(range(last + 1))
        first = max(steps) + 1
    return survived
