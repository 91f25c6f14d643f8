"""Record full runs of the lab for the documentation, and draw what is recorded.

python docs/tools/record.py variance growth --jobs 16    run these, and keep JSON and plots in docs/results
python docs/tools/record.py                              draw again what is there
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.tools.chart import chart
from docs.tools.results import FOLDER

CELLS = Path(__file__).parents[2] / "build" / "lab"  # kept, so that a run that was stopped goes on
STYLE = (
    "<style>.chart{background:#fff;font:11px sans-serif}.chart text{fill:#222}.chart .axis{stroke:#666}"
    ".chart .grid{stroke:#ddd}</style>"
)


def record(name: str, options: list[str], folder: Path = FOLDER) -> None:
    """Run an experiment in full, and keep its result with the command and the seconds it took."""
    command = ["lab", name, *options]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "attnscale", *command, "--out", str(CELLS)], check=True)
    result = json.loads((CELLS / f"{name}.json").read_text(encoding="utf-8"))
    seconds = round(time.perf_counter() - start, 1)
    result["settings"] |= {"command": " ".join(["attnscale", *command]), "seconds": seconds}
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    (folder / f"{name}.json").write_text(text, encoding="utf-8")


def draw(folder: Path = FOLDER) -> dict[str, str]:
    """The plots of everything recorded, each as a file of its own, by name."""
    drawn = {}
    for path in sorted(folder.glob("*.json")):
        for number, plot in enumerate(json.loads(path.read_text(encoding="utf-8"))["plots"], 1):
            svg = chart(plot).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
            drawn[f"{path.stem}-{number}.svg"] = svg.replace(">", f">{STYLE}", 1) + "\n"
    return drawn


def main() -> None:
    """Run what is named, then draw all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="experiments to run; other options go to attnscale lab")
    given, options = parser.parse_known_args()
    for name in given.names:
        record(name, options)
    plots = FOLDER / "plots"
    plots.mkdir(exist_ok=True)
    drawn = draw()
    for old in plots.glob("*.svg"):
        if old.name not in drawn:
            old.unlink()
    for name, svg in drawn.items():
        (plots / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
