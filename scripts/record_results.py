"""Record full runs of the lab for the documentation, and draw their plots.

python scripts/record_results.py variance growth --jobs 16    run these experiments; JSON and plots go to docs/results
python scripts/record_results.py                              draw every recorded result again
python scripts/record_results.py demo                         record the two runs that `attnscale explore` plays back

Then `make generated` writes the results into docs/results/index.md.
"""

import argparse
import hashlib
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from attnscale.lab.demo import HEAD_DIM, STEPS, TASK
from attnscale.theory import critical_spread

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
ON_PAGE = ROOT / "src" / "attnscale" / "show" / "templates" / "explore" / "recorded.json"
SLOTS = {"scaled by 1/√d_k": "inverse_sqrt", "unscaled": "unscaled"}  # of the page's columns, by run of the demo
CELLS = ROOT / "build" / "lab"  # finished cells stay there, so a run that was stopped resumes
# Okabe and Ito's colours, which colour-blind readers can tell apart; dashes tell curves apart in print.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d00", "#777777")
DASHES = ("-", "--", ":", "-.")
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "attnscale", "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "#e5e5e5", "axes.edgecolor": "#666666",
}  # fmt: skip


def record(name: str, options: list[str]) -> None:
    """Run an experiment in full, and store its result with the command and the seconds it took."""
    command, start = ["lab", name, *options], time.perf_counter()
    subprocess.run([sys.executable, "-m", "attnscale", *command, "--out", str(CELLS)], check=True)
    result = json.loads((CELLS / f"{name}.json").read_text(encoding="utf-8"))
    seconds = round(time.perf_counter() - start, 1)
    result["settings"] |= {"command": " ".join(["attnscale", *command]), "seconds": seconds}
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")


def record_for_page(*, demo: bool) -> None:
    """Write what the page of `attnscale explore` shows of recorded results: the demo's runs, and loss against κ."""
    found = json.loads(ON_PAGE.read_text(encoding="utf-8")) if ON_PAGE.exists() else {}
    if demo:
        command = [sys.executable, "-m", "attnscale", "demo", "--json", "--html", str(ROOT / "build" / "demo.html")]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        found["demo"] = condensed(json.loads(run.stdout))
    kappa = json.loads((RESULTS / "kappa.json").read_text(encoding="utf-8"))
    curves = [
        {"head_dim": int(curve["name"].split()[-1]), **{name: curve[name] for name in ("x", "y", "low", "high")}}
        for curve in kappa["plots"][0]["curves"]
    ]
    found["kappa"] = {"command": kappa["settings"]["command"], "curves": curves}
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":")).replace("},{", "},\n{")
    ON_PAGE.write_text(text + "\n", encoding="utf-8")


def condensed(twins: dict[str, Any]) -> dict[str, Any]:
    """Return losses and spreads of the demo's runs, with four digits."""
    runs = {}
    for run in twins["runs"]:
        spreads = []
        for each in run["records"]:
            heads = [spread for layer in each["layers"].values() for spread in layer["spread"]]
            spreads.append([each["step"], _short(sum(heads) / len(heads))])
        runs[SLOTS[run["name"]]] = {"loss": [[step, _short(loss)] for step, loss in run["losses"]], "spread": spreads}
    return {
        "head_dim": HEAD_DIM, "steps": STEPS, "runs": runs,
        "guessing": _short(twins["settings"]["loss of guessing a value of the sequence"]),
        "critical": _short(critical_spread(2 * TASK.pairs * TASK.rounds - 1)),
    }  # fmt: skip


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def digest(plot: dict[str, Any]) -> str:
    """Return a short hash of a plot's data, which its picture contains, so that a stale picture is noticed."""
    return hashlib.sha256(json.dumps(plot, sort_keys=True).encode()).hexdigest()[:16]


def draw(plot: dict[str, Any], path: Path) -> None:
    """Draw a plot or a heat map as SVG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes: Any = figure.subplots()
        (_draw_heat_map if plot["kind"] == "heatmap" else _draw_curves)(plot, axes)
        axes.set(xlabel=plot["x_label"], ylabel=plot["y_label"])
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Title": plot["title"], "Source": digest(plot)})
    svg = re.sub(r"(?<=\d\.\d\d)\d+", "", path.read_text(encoding="utf-8"))  # a hundredth of a pixel is enough
    path.write_text(" ".join(svg.split()) + "\n", encoding="utf-8")


def _draw_curves(plot: dict[str, Any], axes: Any) -> None:
    axes.set(xscale="log" if plot["log_x"] else "linear", yscale="log" if plot["log_y"] else "linear")
    for index, curve in enumerate(plot["curves"]):
        colour, dash = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
        y, low, high = ([_number(value) for value in curve[name] or ()] for name in ("y", "low", "high"))
        name = f"{curve['name']} (theory)" if curve["is_theory"] else curve["name"]
        marker = "." if len(y) <= 20 and not curve["is_theory"] else ""
        axes.plot(curve["x"], y, ":" if curve["is_theory"] else dash, marker=marker, color=colour, label=name)
        if low and high:
            axes.fill_between(curve["x"], low, high, color=colour, alpha=0.15, linewidth=0)
    axes.minorticks_off()
    if len(plot["curves"]) > 1:
        axes.figure.legend(loc="outside lower center", ncols=2, frameon=False)


def _draw_heat_map(plot: dict[str, Any], axes: Any) -> None:
    values = [[_number(value) for value in row] for row in plot["values"]]
    image = axes.imshow(values, aspect="auto", cmap="cividis")
    axes.grid(visible=False)
    for labels, axis in ((plot["columns"], axes.xaxis), (plot["rows"], axes.yaxis)):
        every = math.ceil(len(labels) / 16)
        axis.set_ticks(
            range(0, len(labels), every),
            [f"{label:.4g}" if isinstance(label, float) else str(label) for label in labels[::every]],
        )
    if len(plot["columns"]) <= 16 and len(plot["rows"]) <= 20:
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                colour = "black" if image.norm(value) > 0.55 else "white"
                axes.text(j, i, f"{value:.3g}", ha="center", va="center", color=colour, size=8)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def main() -> None:
    """Run the named experiments, then draw all that are recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="experiments to run; other options go to attnscale lab")
    arguments, options = parser.parse_known_args()
    for name in arguments.names:
        if name != "demo":
            record(name, options)
    record_for_page(demo="demo" in arguments.names)
    for old in (RESULTS / "plots").glob("*.svg"):
        old.unlink()
    for path in sorted(RESULTS.glob("*.json")):
        for number, plot in enumerate(json.loads(path.read_text(encoding="utf-8"))["plots"], 1):
            draw(plot, RESULTS / "plots" / f"{path.stem}-{number}.svg")


if __name__ == "__main__":
    main()
