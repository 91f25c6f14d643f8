"""Compare attention on random inputs on a GPU with float64: `python benchmarks/random_cases.py --cases 10000`."""

import argparse
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from torch import Tensor

from attnscale import attention_with_stats, score_stats
from attnscale.measure import ScoreStats

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (11, 40, 64, 96, 128, 256)
LENGTHS = (1, 2, 7, 31, 64, 65, 127, 128, 129, 200, 257, 384, 511, 513, 700, 1025)
LONG, LONG_SHARE = (4096, 5003, 8209), 0.02  # lengths of very long rows, and their share of the cases
RELATIVE = ("mean", "variance", "max", "entropy", "entropy_ratio", "top1", "jacobian_trace", "effective_keys")


@dataclass(frozen=True)
class Case:
    """One attention; `offset` moves queries and keys off zero, in standard deviations."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: torch.dtype
    is_causal: bool
    amplitude: float
    offset: float

    @classmethod
    def draw(cls, source: random.Random, kinds: list[tuple[torch.dtype, int]]) -> "Case":
        """Draw a case with one of these dtypes and head dimensions."""
        kv_heads, group = source.choice((1, 2, 3)), source.choice((1, 1, 2, 4))
        dtype, head_dim = source.choice(kinds)
        q_len = source.choice(LENGTHS)
        if long := source.random() < LONG_SHARE:
            q_len, kv_heads, group = source.choice(LONG), 1, 1
        return cls(
            batch=1 if long else source.choice((1, 2, 3)),
            heads=kv_heads * group,
            kv_heads=kv_heads,
            q_len=q_len,
            kv_len=q_len if source.random() < 0.5 else source.choice(LENGTHS),
            head_dim=head_dim,
            dtype=dtype,
            is_causal=source.random() < 0.5,
            amplitude=source.choice((0.3, 1.0, 1.0, 4.0)),
            offset=source.choice((0.0, 0.0, 0.5, 2.0, 10.0)),
        )

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value on the GPU."""
        width = self.batch, self.kv_heads, self.kv_len, self.head_dim
        query = torch.randn(self.batch, self.heads, self.q_len, self.head_dim, device="cuda")
        query = self.amplitude * (query + self.offset * torch.randn(self.head_dim, device="cuda"))
        key = torch.randn(width, device="cuda") + self.offset * torch.randn(self.head_dim, device="cuda")
        value = torch.randn(width, device="cuda")
        return query.to(self.dtype), key.to(self.dtype), value.to(self.dtype)


def expected(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Return output and statistics from the full matrix in float64."""
    group = query.shape[1] // key.shape[1]
    query, key, value = (
        x.double() for x in (query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))
    )
    scores = query @ key.mT * query.shape[-1] ** -0.5
    shown = torch.ones_like(scores, dtype=torch.bool)
    if is_causal:
        shown = shown.tril()
    visible = shown.sum(-1)
    hidden = scores.masked_fill(~shown, -torch.inf)
    highest = hidden.amax(-1)
    below = scores - highest.unsqueeze(-1)
    weights = torch.where(shown, below.exp(), 0.0)
    total = weights.sum(-1)
    gap = -(weights * below).sum(-1) / total
    entropy = total.log() + gap
    participation = (weights.square().sum(-1)) / total.square()
    several = visible > 1
    number = shown.sum((0, 2, 3))
    mean = torch.where(shown, scores, 0.0).sum((0, 2, 3)) / number
    away = torch.where(shown, scores - mean.view(-1, 1, 1), 0.0)
    ratio = torch.where(several, entropy / visible.clamp(min=2).log(), 0.0).sum((0, 2)) / several.sum((0, 2))
    found = {
        "mean": mean,
        "variance": away.square().sum((0, 2, 3)) / number,
        "max": highest.amax((0, 2)),
        "entropy": entropy.mean((0, 2)),
        "entropy_ratio": ratio,
        "top1": (1 / total).mean((0, 2)),
        "jacobian_trace": (1 - participation).mean((0, 2)),
        "effective_keys": (1 / participation).mean((0, 2)),
        "saturated": ((1 / total) > 0.99).double().mean((0, 2)),
    }
    return weights @ value / total.unsqueeze(-1), found


def errors(stats: ScoreStats, wanted: dict[str, Tensor]) -> dict[str, float]:
    """Return the error of each statistic, relative to the std of the scores for mean and maximum, else to itself."""
    spread = wanted["variance"].sqrt().clamp(min=1e-2) + 1e-2 * wanted["max"].abs()
    found = {}
    for name in RELATIVE:
        scale = spread if name in ("mean", "max") else wanted[name].abs().clamp(min=1e-2)
        error = (getattr(stats, name) - wanted[name]).abs() / scale
        known = wanted[name].isfinite()
        found[name] = torch.where(known, error.nan_to_num(torch.inf), 0.0).max().item()
    found["saturated"] = (stats.saturated - wanted["saturated"]).abs().max().item()
    return found


Worst = dict[tuple[str, str, str], tuple[float, Case]]


def look(kinds: list[tuple[torch.dtype, int]], cases: int, seed: int) -> Worst:
    """Return the worst error of each statistic by dtype, over random cases of these dtypes and head dimensions."""
    source = random.Random(seed)
    torch.manual_seed(seed)
    worst: Worst = {}
    for _ in range(cases):
        case = Case.draw(source, kinds)
        qkv = case.operands()
        options = {"is_causal": case.is_causal, "enable_gqa": case.heads != case.kv_heads}
        output, stats = attention_with_stats(*qkv, **options)
        attended, wanted = expected(*qkv, case.is_causal)
        ways = {"with output": stats, "alone": score_stats(*qkv[:2], **options)}
        found = {(way, name): error for way, each in ways.items() for name, error in errors(each, wanted).items()}
        tolerance = attended.abs().amax().clamp(min=1e-3)
        found["with output", "output"] = ((output.double() - attended).abs().amax() / tolerance).item()
        keep(worst, {(str(case.dtype)[6:], *place): (error, case) for place, error in found.items()})
    return worst


def keep(worst: Worst, found: Worst) -> None:
    """Add larger errors to `worst`; NaN counts as larger than any number."""
    for place, (error, case) in found.items():
        if not error <= worst.get(place, (-1.0, case))[0]:
            worst[place] = error, case


def main() -> None:
    """Print the worst error of each statistic by dtype; kernels compile in several workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    begun, worst = time.perf_counter(), Worst()
    kinds = [(dtype, head_dim) for head_dim in HEAD_DIMS for dtype in DTYPES]
    workers = min(arguments.workers, len(kinds))
    shares = [kinds[index::workers] for index in range(workers)]
    counts = [arguments.cases * (index + 1) // workers - arguments.cases * index // workers for index in range(workers)]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for found in pool.map(look, shares, counts, range(arguments.seed, arguments.seed + workers)):
            keep(worst, found)
    for (dtype, way, name), (error, case) in sorted(worst.items()):
        print(f"{dtype:9} {way:12} {name:15} {error:.1e}  {case}")
    print(f"{arguments.cases} cases in {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
