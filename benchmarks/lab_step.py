"""Time the library's operator in a training step of the lab's model: `python benchmarks/lab_step.py`

The lab's model and a plain model train alternately with the same weights and batches. The plain model is the same
transformer without this library: it calls F.scaled_dot_product_attention, and computes its rotary tables once. Print
the median ratio of successive steps with its quartiles. Fail if a median is above the limit.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnscale.lab.tasks import Characters
from attnscale.lab.training import adam, seeded_model
from attnscale.models.transformer import ROTARY_BASE

LIMIT = 1.1


class PlainAttention(nn.Module):
    """Causal attention with rotary positions on plain SDPA."""

    def __init__(self, twin: nn.Module, length: int) -> None:
        super().__init__()
        self.heads, self.head_dim = twin.heads, twin.head_dim
        self.query, self.key, self.value, self.output = twin.query, twin.key, twin.value, twin.output
        half = self.head_dim // 2
        angle = torch.arange(length)[:, None] * ROTARY_BASE ** -(torch.arange(half) / half)
        device = twin.query.weight.device
        self.register_buffer("cos", angle.cos().to(device), persistent=False)
        self.register_buffer("sin", angle.sin().to(device), persistent=False)

    def forward(self, x: Tensor, _: object = None) -> Tensor:
        """Project, rotate, attend, project back; uses its own rotary tables."""
        batch, length, _ = x.shape
        query, key, value = (
            project(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        out = F.scaled_dot_product_attention(self._rotate(query), self._rotate(key), value, is_causal=True)
        return self.output(out.transpose(1, 2).reshape(batch, length, -1))

    def _rotate(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * self.cos - right * self.sin, right * self.cos + left * self.sin], dim=-1)


class Run:
    """A model in training."""

    def __init__(self, given: argparse.Namespace, is_plain: bool) -> None:
        self.task = Characters(given.length)
        model = seeded_model(self.task.vocabulary, 0, head_dim=given.head_dim).to(given.device)
        if is_plain:
            for block in model.blocks:
                block.attention = PlainAttention(block.attention, given.length)
        self.model, self.device = model, given.device
        self.optimiser = adam(model, 1e-3)

    def seconds(self, seed: int, batch: int) -> tuple[float, float]:
        """Train one step; return its seconds and its loss."""
        examples = self.task.batch(batch, torch.Generator().manual_seed(seed))
        self._wait()
        start = time.perf_counter()
        loss = examples.loss(self.model)
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        self._wait()
        return time.perf_counter() - start, loss.item()

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def compare(given: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Return the ratios of paired steps, whose order alternates, and the seconds of plain steps."""
    runs = {"lab": Run(given, is_plain=False), "plain": Run(given, is_plain=True)}
    ratios, plain = [], []
    for turn in range(given.rounds + given.warm_up):
        found = {name: runs[name].seconds(turn, given.batch) for name in (runs if turn % 2 else reversed(runs))}
        if abs(found["lab"][1] - found["plain"][1]) > 1e-3 * found["plain"][1]:
            sys.exit(f"The two models differ: step {turn} has the losses {found['lab'][1]}, {found['plain'][1]}.")
        if turn >= given.warm_up:
            ratios.append(found["lab"][0] / found["plain"][0])
            plain.append(found["plain"][0])
    return ratios, plain


def main() -> None:
    """Print medians and quartiles, record them, and fail if a median is above the limit."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--head-dims", type=int, nargs="+", default=[8, 32, 128, 256])
    arguments.add_argument("--length", type=int, default=32)
    arguments.add_argument("--batch", type=int, default=16)
    arguments.add_argument("--rounds", type=int, default=100)
    arguments.add_argument("--warm-up", type=int, default=10)
    arguments.add_argument("--threads", type=int, default=1, help="threads of torch; the lab's cells use one")
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--out", type=Path, default=None)
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    found = []
    for head_dim in given.head_dims:
        given.head_dim = head_dim
        ratios, plain = compare(given)
        low, middle, high = statistics.quantiles(ratios, n=4)
        seconds = statistics.median(plain)
        print(f"d_k {given.head_dim}: {middle:.3f}× ({low:.3f}–{high:.3f}) of {1e3 * seconds:.2f} ms", flush=True)
        found.append({"head_dim": given.head_dim, "ratio": middle, "quartiles": [low, high], "plain_seconds": seconds})
    if given.out is not None:
        names = ("length", "batch", "rounds", "threads", "device")
        shape = {name: getattr(given, name) for name in names} | {"torch": torch.__version__}
        given.out.write_text(json.dumps({**shape, "limit": LIMIT, "found": found}, indent=1) + "\n", encoding="utf-8")
    over = [f"{each['ratio']:.3f}× at d_k = {each['head_dim']}" for each in found if each["ratio"] > LIMIT]
    if over:
        sys.exit(f"Over the limit of {LIMIT}×: {', '.join(over)}.")


if __name__ == "__main__":
    main()
