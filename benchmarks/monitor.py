"""What monitoring costs a training step of GPT-2-small's shape: `python benchmarks/monitor.py`

On a CPU with fewer layers. On a GPU: `--device cuda --layers 12 --length 1024 --batch 16 --vocabulary 50257`, and
`--dtype bfloat16` for autocast.
Three steps, of which a Monitor watches the second, are timed beside three plain ones, in turns; what they take longer,
over a third of the plain ones, is the cost of a watched step. So nothing is left out: the monitor begins to watch at
the end of the first, and writes the record at the end of the third, since it does not wait for a GPU. Nor does the
loop, until the three are over; with `--waits` it does after every step, as one that reads its loss each time.
Between watched steps nothing is left in place (a test holds that), so a step there costs the call of monitor.step()
itself, which is timed alone. Of the steps it watches, the first and every tenth are followed through every operation;
the others, where attention is fused kernels, are known by those. Monitoring every 50th step costs
(49 · between + (9 · watched + followed) / 10) / 50 of a plain step. Fails where a median is above its limit.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from attnscale import Monitor
from attnscale.models import CausalTransformer
from attnscale.train.sampling import FOLLOWED

D_MODEL, HEADS = 768, 12
LIMITS = {"cpu": {"watched": 1.15, "every 50th": 1.01}, "cuda": {"watched": 1.03, "every 50th": 1.01}}
EVERY, CALLS, STEPS = 50, 100_000, 3
KINDS = ("plain", "watched")


class Run:
    """A model in training, with or without a monitor."""

    def __init__(self, given: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device, self.dtype, self.waits = given.device, getattr(torch, given.dtype), given.waits
        self.model = CausalTransformer(given.vocabulary, D_MODEL, given.layers, HEADS).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.tokens = torch.randint(0, given.vocabulary, (given.batch, given.length + 1), device=self.device)
        self.monitor = Monitor(self.model, every=EVERY)
        self.monitor.cancel()

    def step(self) -> None:
        """One step as anyone writes it."""
        with torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.model(self.tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, kind: str) -> float:
        """The time of STEPS steps, all of them plain, or the second watched."""
        self.monitor.steps += EVERY - 1 - self.monitor.steps % EVERY  # the next is due
        self._wait()
        start = time.perf_counter()
        for _ in range(STEPS):
            self.step()
            if kind == "watched":
                self.monitor.step()
            if self.waits:
                self._wait()
        self._wait()
        return time.perf_counter() - start

    def call_seconds(self) -> float:
        """The time of monitor.step() where neither this step nor the next is watched."""
        start = time.perf_counter()
        for _ in range(CALLS):
            self.monitor.steps = 1
            self.monitor.step()
        return (time.perf_counter() - start) / CALLS

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def ratios(run: Run, rounds: int) -> dict[str, list[float]]:
    """Of neighbours, each first in every second round; the first ten warm up."""
    found: dict[str, list[float]] = {"watched": [], "followed": []}
    for turn in range(FOLLOWED + rounds):
        kind = "watched" if turn % FOLLOWED else "followed"
        times = {name: run.seconds(name) for name in (KINDS if turn % 2 else reversed(KINDS))}
        if turn >= FOLLOWED:
            found[kind].append(1 + STEPS * (times["watched"] - times["plain"]) / times["plain"])
    return found


def main() -> None:
    """Print medians and quartiles, record them, and hold them to the limits."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--layers", type=int, default=2)
    arguments.add_argument("--length", type=int, default=512)
    arguments.add_argument("--batch", type=int, default=4)
    arguments.add_argument("--rounds", type=int, default=20, help="at least 20, of which two are followed")
    arguments.add_argument("--vocabulary", type=int, default=1024)
    arguments.add_argument("--device", choices=LIMITS, default="cpu")
    arguments.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="other than float32: by autocast"
    )
    arguments.add_argument("--waits", action="store_true", help="for the GPU after every step")
    arguments.add_argument("--threads", type=int, default=None, help="of torch; one is steadier on a busy machine")
    arguments.add_argument("--out", type=Path, default=None)
    given = arguments.parse_args()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    run = Run(given)
    found = ratios(run, given.rounds)
    quartiles = {kind: statistics.quantiles(each if len(each) > 1 else 2 * each, n=4) for kind, each in found.items()}
    for kind, (low, middle, high) in quartiles.items():
        print(f"{kind}: {middle:.3f}× ({low:.3f}–{high:.3f})", flush=True)
    plain, call = statistics.median(run.seconds("plain") for _ in range(3)) / STEPS, run.call_seconds()
    costs = {kind: middle for kind, (_, middle, _) in quartiles.items()} | {"between": 1 + call / plain}
    print(f"between: monitor.step() takes {1e6 * call:.2f} µs")
    sampled = ((FOLLOWED - 1) * costs["watched"] + costs["followed"]) / FOLLOWED
    costs["every 50th"] = ((EVERY - 1) * costs["between"] + sampled) / EVERY
    print(f"every 50th: {costs['every 50th']:.4f}× of {1e3 * plain:.0f} ms")
    if given.out is not None:
        shape = {name: value for name, value in vars(given).items() if name != "out"}
        recorded = {**shape, "plain_seconds": plain, "ratios": costs, "quartiles": quartiles}
        given.out.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    limits = LIMITS[given.device].items()
    over = [f"{kind} {costs[kind]:.3f}× > {limit}×" for kind, limit in limits if costs[kind] > limit]
    if over:
        sys.exit(f"Over the limit: {', '.join(over)}.")


if __name__ == "__main__":
    main()
