"""How often ±1.96 standard errors of a sample cover the exact statistic: `python benchmarks/coverage.py`."""

import torch

from attnscale import score_stats

SAMPLES = 1000
ROWS = 64
NAMES = ("mean", "variance", "std", "entropy", "entropy_ratio", "top1", "gradient_gain", "effective_keys")


def coverage(is_causal: bool) -> dict[str, float]:
    """The share of samples whose interval holds the exact value, over four heads of 512 keys and unit spread."""
    query, key = torch.randn(1, 4, 512, 16), torch.randn(1, 4, 512, 16)
    exact = score_stats(query, key, is_causal=is_causal)
    hits = dict.fromkeys(NAMES, 0.0)
    for _ in range(SAMPLES):
        stats = score_stats(query, key, is_causal=is_causal, rows=ROWS)
        for name in NAMES:
            inside = (getattr(stats, name) - getattr(exact, name)).abs() <= 1.96 * stats.stderr(name)
            hits[name] += inside.double().mean().item() / SAMPLES
    return hits


def main() -> None:
    """Print the coverage of every statistic, full and causal."""
    torch.manual_seed(0)
    for is_causal in (False, True):
        found = coverage(is_causal)
        print("causal" if is_causal else "full  ", *(f"{name} {share:.3f}" for name, share in found.items()))


if __name__ == "__main__":
    main()
