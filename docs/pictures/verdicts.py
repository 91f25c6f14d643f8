"""Draw a picture of each verdict for docs/guides/healthy.md, from heads that were measured: part of `make pictures`."""

from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor, nn

import attnscale
from attnscale.diagnose.verdict import Verdict, head_verdicts
from attnscale.theory.limits import CRITICAL_MARGIN, DILUTED_SPREAD, critical_spread

FOLDER = Path(__file__).parent / "verdicts"
LENGTH, HEAD_DIM = 48, 64
# Spread of the scores, and the rows that are measured (None: all), that lead to each verdict.
CASES: dict[str, tuple[float, int | None]] = {
    "healthy": (1.0, None),
    "sharp": (6.0, None),
    "diluted": (0.05, None),
    "uncertain": (CRITICAL_MARGIN * critical_spread(LENGTH), 24),
    "non_finite": (float("inf"), None),
}
STYLE = {"svg.hashsalt": "attnscale", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


class Head(nn.Module):
    """One head of attention whose scores have a chosen spread."""

    def __init__(self, spread: float) -> None:
        super().__init__()
        self.scale = spread * HEAD_DIM**-0.5

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Attend, with the keys as values."""
        return nn.functional.scaled_dot_product_attention(query, key, key, scale=self.scale)


def measured(name: str) -> tuple[Verdict, Tensor]:
    """Return the verdict on a head, and its weights, (rows, keys)."""
    spread, rows = CASES[name]
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, LENGTH, HEAD_DIM)
    head = Head(spread)
    with attnscale.watch(head, rows=rows) as seen:
        head(query, key)
    (layer,) = seen.layers.values()
    (verdict,) = head_verdicts(layer)
    return verdict, torch.softmax(query @ key.mT * head.scale, dim=-1)[0, 0]


def draw(name: str, path: Path) -> None:
    """Draw the weights of a head, and where its spread lies."""
    verdict, weights = measured(name)
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.3), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 2))
        left.imshow(weights, cmap="viridis", vmin=0, vmax=0.3, interpolation="nearest")
        left.set(
            title="weights, NaN" if weights.isnan().any() else "weights",
            xlabel="key",
            ylabel="query",
            xticks=[],
            yticks=[],
        )
        limits = [0.02, DILUTED_SPREAD, CRITICAL_MARGIN * verdict.critical_spread, 20]
        for state, low, high, colour in zip(
            ("diluted", "healthy", "sharp"), limits, limits[1:], ("#cfd8dc", "#c8e6c9", "#ffe0b2"), strict=False
        ):
            right.axvspan(low, high, color=colour, lw=0)
            right.text((low * high) ** 0.5, 0.9, state, ha="center")
        right.axvline(verdict.critical_spread, color="#d32f2f", ls="--")
        right.text(verdict.critical_spread * 1.06, 0.06, "critical\nspread", color="#d32f2f", fontsize=7)
        if verdict.verdict == "non_finite":
            right.text(0.63, 0.45, "scores are inf or NaN: no spread", ha="center")
        else:
            right.errorbar(verdict.spread, 0.5, xerr=verdict.spread_error or None, fmt=".", color="black", capsize=6)
        right.set(xscale="log", xlim=(limits[0], limits[-1]), ylim=(0, 1.05), yticks=[], xlabel="spread of the scores")
        right.set_xticks([0.05, 0.2, 1, 3, 10], ["0.05", "0.2", "1", "3", "10"], minor=False)
        right.set_xticks([], minor=True)
        right.set_title(f"verdict: {verdict.verdict}")
        figure.savefig(path, dpi=110, metadata={"Software": None})


def main(folder: Path = FOLDER) -> None:
    """Draw all verdicts."""
    folder.mkdir(exist_ok=True)
    for name in CASES:
        draw(name, folder / f"{name}.png")


if __name__ == "__main__":
    main()
