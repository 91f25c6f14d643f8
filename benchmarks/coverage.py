"""Measure how often ±1.96 standard errors of a sample cover the exact value: `python benchmarks/coverage.py [WORDS]`.

Samples with an unknown error (NaN) are excluded; the last column is the share of the others. `SAMPLES=200` draws fewer
samples, `SEED=1` draws other heads, and WORDS select the cases whose names contain them.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attnscale import ScoreStats, score_stats

SAMPLES = int(os.environ.get("SAMPLES", "1000"))
SEED = int(os.environ.get("SEED", "0"))
HEADS = 4
NAMES = (
    "mean", "variance", "std", "entropy", "entropy_ratio", "top1", "saturated", "jacobian_trace", "effective_keys",
)  # fmt: skip


def lengths_of_t(query: Tensor, key: Tensor, freedom: int) -> tuple[Tensor, Tensor]:
    """Give the queries lengths that follow Student's t."""
    chi = torch.randn(*query.shape[:-1], freedom).square().mean(-1, keepdim=True).sqrt()
    return query / chi, key


def lognormal_lengths(query: Tensor, key: Tensor, spread: float) -> tuple[Tensor, Tensor]:
    """Give the queries lognormal lengths: `spread` is the standard deviation of their logarithms."""
    return query * torch.exp(spread * torch.randn(*query.shape[:-1], 1)), key


def outliers(query: Tensor, key: Tensor, rows: int, times: float) -> tuple[Tensor, Tensor]:
    """Multiply `rows` random queries of each head; heads have different rows."""
    for head in query[0]:
        head[torch.randperm(len(head))[:rows]] *= times
    return query, key


def sharp_at_the_end(query: Tensor, key: Tensor, times: float) -> tuple[Tensor, Tensor]:
    """Multiply the queries of the last tenth of the rows."""
    query[..., -query.shape[-2] // 10 :, :] *= times
    return query, key


def along_the_keys(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Give all keys a common direction, and one query the same direction with the usual length."""
    key = key + 2 * torch.randn_like(key[..., :1, :])
    usual = key.mean(-2)
    query[..., 7 * query.shape[-2] // 9, :] = usual * query.shape[-1] ** 0.5 / usual.norm(dim=-1, keepdim=True)
    return query, key


def one_long_key(query: Tensor, key: Tensor, times: float) -> tuple[Tensor, Tensor]:
    """Multiply the first key, which every row sees."""
    key[..., 0, :] *= times
    return query, key


def two_kinds(query: Tensor, key: Tensor, share: float, times: float) -> tuple[Tensor, Tensor]:
    """Multiply the queries of a random share of the rows."""
    return query * torch.where(torch.rand(*query.shape[:-1], 1) < share, times, 1.0), key


@dataclass(frozen=True)
class Case:
    """Heads of Gaussian queries and keys, after the transformation `transform`, described by `label`."""

    is_causal: bool
    spread: float = 1.0
    keys: int = 512
    head_dim: int = 64
    batch: int = 1
    rows: int = 64
    label: str = ""
    transform: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda query, key: (query, key)

    def __str__(self) -> str:
        kind = ("causal" if self.is_causal else "full") + (f", {self.label}" if self.label else "")
        return f"{kind}, spread {self.spread:g}, {self.batch} × {self.keys} × {self.head_dim}, {self.rows} rows"

    def operands(self) -> tuple[Tensor, Tensor]:
        """Return query and key."""
        return self.transform(*(torch.randn(self.batch, HEADS, self.keys, self.head_dim) for _ in range(2)))

    def sampled(self, query: Tensor, key: Tensor) -> ScoreStats:
        """Return the statistics of some rows."""
        return score_stats(query, key, is_causal=self.is_causal, scale=self.scale, rows=self.rows)

    @property
    def scale(self) -> float:
        """Scale at which scores of independent queries and keys have this spread."""
        return self.spread / self.head_dim**0.5


BOTH = (False, True)
NAMED = {  # groups of cases whose rows differ in some way
    "one outlier row in 1,000": [
        Case(causal, keys=1000, label=f"one row × {times}", transform=partial(outliers, rows=1, times=times))
        for causal, times in ((False, 10.0), (True, 30.0))
    ],
    "more outlier rows than are taken for certain": [
        Case(causal, keys=1000, label="5 rows × 10", transform=partial(outliers, rows=5, times=10.0)) for causal in BOTH
    ],
    "causal batches of few positions": [
        Case(True, keys=256, batch=batch, rows=rows) for batch, rows in ((4, 32), (8, 64), (16, 64), (16, 32))
    ],
    "a head sharp in its last tenth": [
        Case(causal, label=f"last tenth × {times}", transform=partial(sharp_at_the_end, times=times))
        for causal, times in ((False, 2.0), (False, 8.0), (True, 4.0))
    ],
    "heavy tails": [
        *(Case(causal, label="lengths t(3)", transform=partial(lengths_of_t, freedom=3)) for causal in BOTH),
        *(Case(causal, label="lognormal", transform=partial(lognormal_lengths, spread=0.8)) for causal in BOTH),
        *(Case(causal, label="lognormal", transform=partial(lognormal_lengths, spread=0.3)) for causal in BOTH),
    ],
    "effective keys": [Case(causal, spread, keys=1024) for causal in BOTH for spread in (2, 4)],
    "others": [
        Case(False, keys=1000, label="one row along the keys", transform=along_the_keys),
        Case(True, label="one long key", transform=partial(one_long_key, times=6.0)),
        Case(False, label="a tenth × 3", transform=partial(two_kinds, share=0.1, times=3.0)),
        Case(False, rows=12),
    ],
}
CASES = [
    *(Case(causal, head_dim=16) for causal in BOTH),
    *(Case(causal, spread) for causal in BOTH for spread in (0.5, 1, 2, 3, 5, 8)),
    *(Case(causal, spread, rows=32) for causal in BOTH for spread in (1, 2)),
    *(Case(causal, 2, keys, dim) for causal in BOTH for keys, dim in ((256, 32), (2048, 64))),
    *(Case(causal, batch=4, rows=rows) for causal in BOTH for rows in (32, 64, 128)),
    *(case for cases in NAMED.values() for case in cases),
]


def coverage(case: Case, samples: int = SAMPLES) -> tuple[dict[str, float], float]:
    """Return the share of intervals that contain the exact value, and the share of known intervals, over all heads."""
    torch.manual_seed(SEED)
    query, key = case.operands()
    exact = score_stats(query, key, is_causal=case.is_causal, scale=case.scale)
    hits, told = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
    for _ in range(samples):
        stats = case.sampled(query, key)
        for name in NAMES:
            error = stats.stderr(name)
            inside = (getattr(stats, name) - getattr(exact, name)).abs() <= 1.96 * error
            hits[name] += int(inside.sum())
            told[name] += int((~error.isnan()).sum())
    shares = {name: hits[name] / told[name] if told[name] else float("nan") for name in NAMES}
    return shares, told["entropy"] / (samples * HEADS)


def main(words: list[str]) -> None:
    """Print the coverage of every statistic, in per cent, as a table in Markdown."""
    print("| batch × keys × head width", *(f"| {name}" for name in NAMES), "| told |")
    print("|---" * (len(NAMES) + 2) + "|")
    for case in CASES:
        if all(word in str(case) for word in words):
            shares, told = coverage(case)
            each = ("–" if share != share else f"{100 * share:.1f}" for share in shares.values())
            print(f"| {case}", *(f"| {share}" for share in each), f"| {100 * told:.0f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
