"""Time a Monitor and a QKClip in training loops: `python benchmarks/loop.py --device cuda`

Each row of CASES is a model, eager or compiled, with its inputs. One run times three loops of it alternately:

- plain;
- with a Monitor: every step sampled, and one step in ten;
- with a QKClip after every step, on a model whose scores are in range.

Every loop is timed twice: with a synchronisation after each step, so that no host time overlaps with the GPU, and in
groups of ten steps, as in real training. The host time of a step is the time until it returns, before the
synchronisation, on an idle GPU. The additional host time of a loop is divided by the number of attention layers.

The first sampled step runs uncompiled under the tracer, and the second compiles the probes. Both come before the
timing, and so does QKClip's first step. On a CPU, a row of a tiny model shows the host time of each layer. It includes
the measurement itself, which would run on a GPU, so it has no limit.

`--only` selects rows; `--quick` times three turns instead of nine, with more noise. `--profile` also prints where the
host spends its time, in sampled steps and in steps with QKClip. `--curves` compares the losses of 200 steps of each
loop from one seed.
"""

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from attnscale import Monitor, QKClip
from attnscale.models import CausalTransformer

GROUP, EVERY, CALLS = 10, 50, 10_000
QUICK, PROFILED, LARGEST = 3, 10, 25  # turns of --quick; steps and printed lines of --profile
LONG_STEP = 45.0  # ms; on longer steps the host is hidden behind the GPU
LIMITS = {
    "every step": 1.25, "QKClip": 1.08, "every 50th": 1.01, "sample, host ms a layer": 0.4,
    "QKClip, host ms a layer": 0.1, "memory, sampled": 1.01, "memory, QKClip": 1.01,
}  # fmt: skip
LIMITS_OF_LONG_STEPS = LIMITS | {"every step": 1.01, "QKClip": 1.01}
LIMITS_ON_CPU = {"every step": 1.3, "QKClip": 1.1, "every 50th": 1.01}  # not for tiny models


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    make: Callable[[str], nn.Module]  # takes a size
    compiled: bool
    inputs: tuple[int, ...]  # batch and length, or the shape of images
    dtype: torch.dtype = torch.bfloat16
    autocast: bool = False


def gpt2(size: str) -> nn.Module:
    """Return a transformer with GPT-2 small's shape."""
    return CausalTransformer(1024, 96, 2, 4) if size == "small" else CausalTransformer(50_257, 768, 12, 12)


def gpt_on_cpu(size: str) -> nn.Module:
    """Return a transformer of six layers, small enough for two cores."""
    return CausalTransformer(1024, 96, 2, 4) if size == "small" else CausalTransformer(4096, 384, 6, 6)


def hugging_face(name: str, **settings: object) -> Callable[[str], nn.Module]:
    """Return a function that makes a causal language model of Hugging Face by the name of its config."""

    def make(size: str) -> nn.Module:
        import transformers

        small = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 1024}
        large = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "vocab_size": 32_000}
        heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
        if size == "small":
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        given = (small if size == "small" else large) | heads | settings | {"use_cache": False}
        given |= {"head_dim": given["hidden_size"] // given["num_attention_heads"]} if "head_dim" in settings else {}
        if size == "small":
            given |= small
            given |= {"head_dim": 24} if "head_dim" in settings else {}
        config = getattr(transformers, f"{name}Config")(**given)
        return transformers.AutoModelForCausalLM.from_config(config)

    return make


def vit(size: str) -> nn.Module:
    """Return a ViT-B/16."""
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(**(shape if size == "small" else {}), num_labels=100))


SDPA = {"attn_implementation": "sdpa"}
LLAMA = hugging_face("Llama", **SDPA)
CASES = [
    Case("GPT-2 small, compiled, 16 × 1,024", gpt2, True, (16, 1024), torch.float32, autocast=True),
    Case("GPT-2 small, eager, 16 × 1,024", gpt2, False, (16, 1024), torch.float32, autocast=True),
    Case("Llama, compiled, 8 × 2,048", LLAMA, True, (8, 2048)),
    Case("Llama, eager, 8 × 2,048", LLAMA, False, (8, 2048)),
    Case("Llama, compiled, 4 × 1,024", LLAMA, True, (4, 1024)),
    Case("Llama, eager, 8 × 1,024", LLAMA, False, (8, 1024)),
    Case("Qwen3, compiled, 8 × 1,024", hugging_face("Qwen3", head_dim=64, **SDPA), True, (8, 1024)),
    Case(
        "Gemma-2, compiled, 8 × 1,024",
        hugging_face(
            "Gemma2",
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=6,
            num_attention_heads=12,
            head_dim=64,
            sliding_window=512,
            attn_logit_softcapping=50.0,
            attn_implementation="eager",
        ),
        True,
        (8, 1024),
    ),
    Case("GPT-NeoX, compiled, 8 × 1,024", hugging_face("GPTNeoX", **SDPA), True, (8, 1024)),
    Case("ViT-B, eager, 64 images", vit, False, (64, 3, 224, 224)),
]
TINY = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 256, "num_hidden_layers": 12}
ON_CPU = [
    Case("GPT of 6 layers, eager, 4 × 256", gpt_on_cpu, False, (4, 256), torch.float32),
    Case(
        "tiny Llama of 12 layers, eager, 1 × 96", hugging_face("Llama", **TINY, **SDPA), False, (1, 96), torch.float32
    ),
]


class Loop:
    """A model in a usual training loop."""

    def __init__(self, case: Case, given: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device, self._case = given.device, case
        gc.collect()  # memory of an earlier loop must not be freed while this one is measured
        before = self._allocated()
        self.model = case.make("small" if given.small else "whole").to(self.device, case.dtype).train()
        self.run = torch.compile(self.model) if case.compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=self.device == "cuda")
        batch, *rest = case.inputs
        if given.small:
            batch, rest = 2, rest if len(rest) > 1 else [64]
        if len(rest) == 1:
            vocabulary = self.model.get_input_embeddings().num_embeddings if hasattr(self.model, "config") else 1024
            self.inputs = torch.randint(0, vocabulary, (batch, rest[0] + 1), device=self.device)
        else:
            self.inputs = torch.randn(batch, *rest, device=self.device, dtype=case.dtype)
        self.after: Callable[[], object] = lambda: None
        self.own = self._allocated() - before

    def _loss(self) -> Tensor:
        if self.inputs.is_floating_point():
            return self.run(self.inputs).logits.float().square().mean()
        with torch.autocast(self.device, torch.bfloat16, enabled=self._case.autocast):
            logits = self.run(self.inputs[:, :-1])
        logits = logits if isinstance(logits, Tensor) else logits.logits
        return F.cross_entropy(logits.flatten(0, 1).float(), self.inputs[:, 1:].flatten())

    def step(self) -> Tensor:
        """Run one step; return its loss without waiting for it."""
        loss = self._loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after()
        return loss.detach()

    def timed_step(self) -> tuple[float, float]:
        """Return the milliseconds of a synchronised step, and of its host part, before the synchronisation.

        An untimed step comes first; its record is made in the timed step.
        """
        self.step()
        self.wait()
        start = time.perf_counter()
        self.step()
        host = time.perf_counter()
        self.wait()
        return 1e3 * (time.perf_counter() - start), 1e3 * (host - start)

    def timed_group(self) -> float:
        """Return the milliseconds of a step, in a group of ten."""
        self.wait()
        start = time.perf_counter()
        for _ in range(GROUP):
            self.step()
        self.wait()
        return 1e3 * (time.perf_counter() - start) / GROUP

    def peak(self) -> float:
        """Return the peak memory of one step in bytes, including the model."""
        if self.device != "cuda":
            self.step()
            return float("nan")
        self.wait()
        before = self._allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        self.wait()
        return torch.cuda.max_memory_allocated() - before + self.own

    def wait(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0


class Sampled:
    """A loop with a Monitor whose sampling can be switched."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self.monitor = loop, Monitor(loop.model, every=EVERY)
        self.monitor.cancel()

    def run(self, timed: Callable[[], object], every: int) -> object:
        """Time the loop with one step in `every` sampled."""
        self.monitor.every, self.monitor.steps = every, 0
        self.monitor.begin()
        self._loop.after = self.monitor.step
        try:
            return timed()
        finally:
            self._loop.after = lambda: None
            self.monitor.cancel()

    def between(self) -> float:
        """Return the milliseconds of monitor.step() if neither this step nor the next is sampled."""
        self.monitor.every = EVERY
        start = time.perf_counter()
        for _ in range(CALLS):
            self.monitor.steps = 1
            self.monitor.step()
        return 1e3 * (time.perf_counter() - start) / CALLS


def measure(case: Case, given: argparse.Namespace) -> dict[str, object]:
    """Return all numbers of one row."""
    plain, clipped = Loop(case, given), Loop(case, given)
    plain.step()
    sampled = Sampled(plain)
    clip = QKClip(clipped.model, 100.0)
    clipped.after = clip.step
    for _ in range(3):  # the first is traced, the second compiles
        sampled.run(plain.step, every=1)
        clipped.step()
    assert clip.is_inside, "QKClip fell back to the tracer"
    layers, graphs = len(sampled.monitor.layers), counters["stats"]["unique_graphs"]
    loops: dict[str, Callable[[Callable[[Loop], object]], object]] = {
        "plain": lambda timed: timed(plain),
        "every step": lambda timed: sampled.run(lambda: timed(plain), every=1),
        "one step in ten": lambda timed: sampled.run(lambda: timed(plain), every=GROUP),
        "QKClip": lambda timed: timed(clipped),
    }
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    groups: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(given.rounds):
        for name in loops if turn % 2 else reversed(loops):
            if name != "one step in ten":
                steps[name].append(loops[name](Loop.timed_step))
            groups[name].append(loops[name](Loop.timed_group))
    wall = {name: statistics.median(each[0] for each in times) for name, times in steps.items() if times}
    host = {name: statistics.median(each[1] for each in times) for name, times in steps.items() if times}
    group = {name: statistics.median(times) for name, times in groups.items()}
    cost = GROUP * (group["one step in ten"] - group["plain"])
    found: dict[str, object] = {
        "plain, ms": group["plain"],
        "plain, synchronised, ms": wall["plain"],
        "every step": group["every step"] / group["plain"],
        "every step, synchronised": wall["every step"] / wall["plain"],
        "one sample in ten costs, ms": cost,
        "every 50th": 1 + (cost + (EVERY - 1) * sampled.between()) / (EVERY * group["plain"]),
        "QKClip": group["QKClip"] / group["plain"],
        "QKClip, synchronised": wall["QKClip"] / wall["plain"],
        "sample, host ms a layer": (host["every step"] - host["plain"]) / layers,
        "QKClip, host ms a layer": (host["QKClip"] - host["plain"]) / layers,
        "graphs compiled meanwhile": counters["stats"]["unique_graphs"] - graphs,
    }
    if given.profile:
        sampled.run(lambda: profile(f"{case.name}, every step sampled", plain), every=1)
        profile(f"{case.name}, QKClip", clipped)
    peak = plain.peak()
    found["memory, sampled"] = sampled.run(plain.peak, every=1) / peak
    found["memory, QKClip"] = clipped.peak() / peak
    sampled.monitor.close()
    clip.close()
    return found


def profile(name: str, loop: Loop) -> None:
    """Print where the host spends its time, backward passes included."""
    for order in ("tottime", "cumtime"):
        loop.wait()
        profiler = cProfile.Profile()
        with torch.autograd.set_multithreading_enabled(False):  # otherwise backward runs on an unprofiled thread
            profiler.enable()
            for _ in range(PROFILED):
                loop.step()
            profiler.disable()
        print(f"{name}, host time of {PROFILED} steps by {order}:")
        only = ["attnscale"] if order == "cumtime" else []
        pstats.Stats(profiler).sort_stats(order).print_stats(*only, LARGEST)


def curves(case: Case, given: argparse.Namespace) -> dict[str, float]:
    """Return the largest difference between the losses of each loop and of the plain loop over 200 steps."""
    losses = {}
    for kind in ("plain", "plain again", "sampled", "QKClip"):
        loop = Loop(case, given)
        if kind == "sampled":
            loop.after = Monitor(loop.model, every=5).step
        elif kind == "QKClip":
            loop.after = QKClip(loop.model, 100.0).step
        losses[kind] = torch.stack([loop.step() for _ in range(200)]).cpu()
        del loop
    return {kind: float((each - losses["plain"]).abs().max()) for kind, each in losses.items() if kind != "plain"}


def main() -> None:
    """Print the rows, and the numbers above their limits."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--small", action="store_true", help="tiny models, to try the script")
    arguments.add_argument("--rounds", type=int, default=9, help="number of turns, each of which times every loop")
    arguments.add_argument("--quick", action="store_true", help="three turns")
    arguments.add_argument("--profile", action="store_true", help="also print where the host spends its time")
    arguments.add_argument("--only", nargs="+", default=[""], help="rows whose names contain one of these")
    arguments.add_argument("--curves", action="store_true", help="also compare the losses of 200 steps")
    arguments.add_argument("--out", type=Path, default=None)
    given = arguments.parse_args()
    given.rounds = QUICK if given.quick else given.rounds
    torch.set_float32_matmul_precision("high")
    recorded: dict[str, object] = {}
    over = []
    for case in CASES if given.device == "cuda" or given.small else ON_CPU:
        if not any(part in case.name for part in given.only):
            continue
        torch._dynamo.reset()
        recorded[case.name] = found = measure(case, given)
        print(case.name, flush=True)
        limits = LIMITS if found["plain, ms"] < LONG_STEP else LIMITS_OF_LONG_STEPS
        limits = limits if given.device == "cuda" else {} if "tiny" in case.name else LIMITS_ON_CPU
        for kind, value in found.items():
            limit = limits.get(kind)
            print(f"  {kind}: {value:.4f}{'' if limit is None else f' (at most {limit})'}", flush=True)
            if limit is not None and value > limit:
                over.append(f"{case.name}, {kind}: {value:.4f} > {limit}")
        if given.curves:
            found["losses of 200 steps part by"] = parted = curves(case, given)
            print(f"  losses of 200 steps differ from the plain ones by at most {parted}", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    print("Over the limit: " + ("; ".join(over) or "nothing"))


if __name__ == "__main__":
    main()
