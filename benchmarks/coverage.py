"""How often ±1.96 standard errors of a sample cover the exact statistic: `python benchmarks/coverage.py`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnscale import score_stats

SAMPLES = 1000
HEADS = 4
NAMES = (
    "mean", "variance", "std", "entropy", "entropy_ratio", "top1", "saturated", "gradient_gain", "effective_keys",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Heads of Gaussian queries and keys; of `heavy` ones, the lengths of the queries follow Student's t with 3."""

    is_causal: bool
    spread: float = 1.0
    keys: int = 512
    head_dim: int = 64
    batch: int = 1
    rows: int = 64
    heavy: bool = False

    def __str__(self) -> str:
        kind = ("causal" if self.is_causal else "full") + (", heavy" if self.heavy else "")
        return f"{kind}, spread {self.spread:g}, {self.batch} × {self.keys} × {self.head_dim}, {self.rows} rows"

    def operands(self) -> tuple[Tensor, Tensor]:
        """Query and key."""
        query, key = (torch.randn(self.batch, HEADS, self.keys, self.head_dim) for _ in range(2))
        chi = torch.randn(self.batch, HEADS, self.keys, 3).square().mean(-1, keepdim=True).sqrt()
        return query / chi if self.heavy else query, key


CASES = [
    *(Case(causal, head_dim=16) for causal in (False, True)),
    *(Case(causal, spread) for causal in (False, True) for spread in (0.5, 1, 2, 3, 5, 8)),
    *(Case(causal, spread, rows=32) for causal in (False, True) for spread in (1, 2)),
    *(Case(causal, 2, keys, dim) for causal in (False, True) for keys, dim in ((256, 32), (2048, 64))),
    *(Case(causal, batch=4, rows=rows) for causal in (False, True) for rows in (32, 64, 128)),
    *(Case(causal, heavy=True) for causal in (False, True)),
]


def coverage(case: Case) -> dict[str, float]:
    """The share of samples whose interval holds the exact value, over the heads."""
    torch.manual_seed(0)
    query, key = case.operands()
    scale = case.spread / case.head_dim**0.5
    exact = score_stats(query, key, is_causal=case.is_causal, scale=scale)
    hits = dict.fromkeys(NAMES, 0.0)
    for _ in range(SAMPLES):
        stats = score_stats(query, key, is_causal=case.is_causal, scale=scale, rows=case.rows)
        for name in NAMES:
            inside = (getattr(stats, name) - getattr(exact, name)).abs() <= 1.96 * stats.stderr(name)
            hits[name] += inside.double().mean().item() / SAMPLES
    return hits


def main() -> None:
    """Print the coverage of every statistic, in per cent, as a table in Markdown."""
    print("|", *(f"| {name}" for name in NAMES), "|")
    print("|", *("|---" for _ in NAMES), "|---|", sep="")
    for case in CASES:
        print(f"| {case}", *(f"| {100 * share:.1f}" for share in coverage(case).values()), "|", flush=True)


if __name__ == "__main__":
    main()
