"""What watching and clipping cost in the loops that people run: `python benchmarks/loop.py --device cuda`

GPT-2-small's shape under bfloat16 autocast, 16 × 1,024 tokens, and a Llama of 12 layers of 1,024 with 16 query heads
and 4 key heads in bfloat16, 8 × 2,048: each eager and compiled, in four loops:

- plain, which everything is timed beside, in turns, in one run;
- one with a Monitor: three steps of which the second is sampled, and what they take longer over a third of the plain
  ones, so that what begins before a sampled step and ends after it counts. Steps between are timed as the call of
  monitor.step() alone, since nothing is left in place there. The first sampled step of a compiled model runs
  uncompiled, the second compiles; both come before the timing and are told apart;
- one with a QKClip at every step, on a model whose scores are in range;
- the same with a threshold so low that every head is looked at row by row, and clipped, at every step.

Peak memory is that of the step alone with what its own model holds. With `--curves`, 200 steps of each loop from one
seed, and how far their losses part from the plain one's; `--curves QKClip` takes one of them.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from attnscale import Monitor, QKClip
from attnscale.models import CausalTransformer

EVERY, STEPS, CALLS = 50, 3, 10_000
CURVES = ("plain again", "sampled", "QKClip")
LIMITS = {
    "compiled, sampled": 1.05, "compiled, every 50th": 1.002, "eager, sampled": 1.03, "compiled, QKClip": 1.03,
    "eager, QKClip": 1.04,
}  # fmt: skip


def gpt2(small: bool) -> tuple[torch.nn.Module, Callable, tuple[int, int], int]:
    """A model, the loss of its tokens, batch and length, and the vocabulary."""
    model = CausalTransformer(1024, 96, 2, 4) if small else CausalTransformer(50_257, 768, 12, 12)

    def loss(run, tokens):
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits = run(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return model, loss, (4, 128) if small else (16, 1024), 1024 if small else 50_257


def llama(small: bool) -> tuple[torch.nn.Module, Callable, tuple[int, int], int]:
    """The same, of Hugging Face."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = (
        {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 1024}
        if small
        else {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "vocab_size": 32_000}
    )
    heads = (
        {"num_attention_heads": 4, "num_key_value_heads": 2}
        if small
        else {"num_attention_heads": 16, "num_key_value_heads": 4}
    )
    config = LlamaConfig(**shape, **heads, use_cache=False, attn_implementation="sdpa")
    model = LlamaForCausalLM(config).to(torch.bfloat16)

    def loss(run, tokens):
        logits = run(input_ids=tokens[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return model, loss, (2, 128) if small else (8, 2048), shape["vocab_size"]


MODELS = {"GPT-2 small": gpt2, "Llama 12 × 1,024": llama}


class Loop:
    """A model in training, as anyone writes it."""

    def __init__(self, make: Callable, given: argparse.Namespace, compiles: bool, **compiling: str) -> None:
        torch.manual_seed(0)
        self.device = given.device
        gc.collect()  # what is left of a loop before must not be freed while this one is weighed
        before = self._allocated()
        self.model, self._loss, (batch, length), vocabulary = make(given.small)
        self.model.to(self.device).train()
        self.run = torch.compile(self.model, **compiling) if compiles else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=self.device == "cuda")
        self.tokens = torch.randint(0, vocabulary, (batch, length + 1), device=self.device)
        self.after: Callable = lambda: None
        self.steps(1)
        self.own = self._allocated() - before

    def step(self) -> torch.Tensor:
        """One step; its loss is not waited for."""
        loss = self._loss(self.run, self.tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after()
        return loss.detach()

    def steps(self, count: int) -> float:
        """Seconds that so many steps take."""
        self._wait()
        start = time.perf_counter()
        for _ in range(count):
            self.step()
        self._wait()
        return time.perf_counter() - start

    def peak(self) -> float:
        """Bytes at the height of one step, with what the model holds."""
        if self.device != "cuda":
            self.steps(1)
            return float("nan")
        self._wait()
        before = self._allocated()
        torch.cuda.reset_peak_memory_stats()
        self.steps(1)
        return torch.cuda.max_memory_allocated() - before + self.own

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0


class Sampled:
    """The second of three steps is sampled."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.monitor = loop, Monitor(loop.model, every=EVERY)
        self.monitor.cancel()

    def seconds(self) -> float:
        """Of three steps."""
        self.monitor.steps += EVERY - 1 - self.monitor.steps % EVERY  # the next is due
        self.loop.after = self.monitor.step
        try:
            return self.loop.steps(STEPS)
        finally:
            self.loop.after = lambda: None

    def between(self) -> float:
        """Seconds of monitor.step() where neither this step nor the next is sampled."""
        start = time.perf_counter()
        for _ in range(CALLS):
            self.monitor.steps = 1
            self.monitor.step()
        return (time.perf_counter() - start) / CALLS


def clipped(loop: Loop, threshold: float) -> QKClip:
    """A QKClip after each step of a loop."""
    clip = QKClip(loop.model, threshold)
    loop.after = clip.step
    loop.steps(4)  # the first is followed from outside, and everything with it
    return clip


def measure(name: str, compiles: bool, given: argparse.Namespace) -> dict[str, float]:
    """All ratios of one model, eager or compiled."""
    plain, in_range, over = (Loop(MODELS[name], given, compiles) for _ in range(3))
    sampled = Sampled(plain)
    first = [sampled.seconds() for _ in range(2)]
    clips = [clipped(in_range, 100.0), clipped(over, 1e-3)]
    found: dict[str, float] = {}
    assert all(clip.is_inside for clip in clips), "the model is clipped from outside"
    graphs = counters["stats"]["unique_graphs"]
    ratios: dict[str, list[float]] = {"sampled": [], "QKClip": [], "QKClip, all over": []}
    base: list[float] = []
    for turn in range(given.rounds):
        timed = [
            ("plain", lambda: plain.steps(STEPS)), ("sampled", sampled.seconds),
            ("QKClip", lambda: in_range.steps(STEPS)), ("QKClip, all over", lambda: over.steps(STEPS)),
        ]  # fmt: skip
        times = {kind: seconds() for kind, seconds in (timed if turn % 2 else reversed(timed))}
        base.append(times["plain"] / STEPS)
        ratios["sampled"].append(1 + STEPS * (times["sampled"] / times["plain"] - 1))
        for kind in ("QKClip", "QKClip, all over"):
            ratios[kind].append(times[kind] / times["plain"])
    seconds = statistics.median(base)
    found["plain, ms"] = 1e3 * seconds
    for kind, each in ratios.items():
        low, found[kind], high = statistics.quantiles(each, n=4)
        found[f"{kind}, quartiles"] = [low, high]
    between = sampled.between() / seconds
    found["every 50th"] = 1 + ((EVERY - 1) * between + found["sampled"] - 1) / EVERY
    found["graphs compiled meanwhile"] = counters["stats"]["unique_graphs"] - graphs
    found["first sampled, second sampled, s"] = first
    peak = plain.peak()
    sampled.monitor.steps = 0
    sampled.monitor.begin()
    found["memory, sampled"] = plain.peak() / peak
    sampled.monitor.end()
    found["memory, QKClip"], found["memory, QKClip, all over"] = in_range.peak() / peak, over.peak() / peak
    sampled.monitor.close()
    for clip in clips:
        clip.close()
    return found


def curves(name: str, given: argparse.Namespace) -> dict[str, float]:
    """How far the losses of 200 compiled steps part from those of the plain loop, at most."""
    losses = {}
    for kind in ("plain", *(given.curves or CURVES)):
        loop = Loop(MODELS[name], given, compiles=True)
        if kind == "sampled":
            loop.after = Monitor(loop.model, every=5).step
        elif kind == "QKClip":
            loop.after = QKClip(loop.model, 100.0).step
        losses[kind] = torch.stack([loop.step() for _ in range(200)]).cpu()
        del loop
    return {kind: float((each - losses["plain"]).abs().max()) for kind, each in losses.items() if kind != "plain"}


def main() -> None:
    """Print and record what was measured, with the limits that are passed."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--small", action="store_true", help="shapes for a CPU")
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments.add_argument("--ways", nargs="*", choices=("eager", "compiled"), default=["eager", "compiled"])
    arguments.add_argument("--curves", nargs="*", choices=CURVES, help="losses of 200 steps; of these loops, or of all")
    arguments.add_argument("--out", type=Path, default=None)
    given = arguments.parse_args()
    torch.set_float32_matmul_precision("high")
    recorded, over = {}, []
    for name in given.models:
        for way in given.ways:
            found = measure(name, way == "compiled", given)
            recorded[f"{name}, {way}"] = found
            print(f"{name}, {way}", flush=True)
            for kind, value in found.items():
                shown = ", ".join(f"{each:.3f}" for each in value) if isinstance(value, list) else f"{value:.4f}"
                print(f"  {kind}: {shown}", flush=True)
                limit = LIMITS.get(f"{way}, {kind}", 1.01 if kind.startswith("memory") else None)
                if limit is not None and value > limit:
                    over.append(f"{name}, {way}, {kind}: {value:.4f} > {limit}")
        if given.curves is not None:
            recorded[f"{name}, losses of 200 compiled steps"] = found = curves(name, given)
            print(f"{name}, losses of 200 compiled steps part from the plain ones by at most {found}", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    print("Over the limit: " + ("; ".join(over) or "nothing"))


if __name__ == "__main__":
    main()
