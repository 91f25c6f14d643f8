"""Test if alarms come before the loss departs, and if healthy runs raise none: `python benchmarks/alarms.py`

Small transformers on Python's help texts, watched by attnscale.Monitor: six bugs in three seeds, and eight healthy runs
in three seeds. The losses of a run with a bug and of the same seed without it are smoothed over 20 steps. The loss
departs at the first step from which it stays 0.1 nats above the other, or is not finite. Warnings and errors count as
alarms; notes are counted separately. Results go to benchmarks/results/alarms.json; `--table` prints them as Markdown.
"""

import argparse
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from divergence import departure, smoothed
from forecast_runs import Case, accident, cosine, loss_of, model_of, warmed
from torch import nn

from attnscale import Monitor
from attnscale.models import default_text, encode

RESULTS = Path(__file__).parent / "results" / "alarms.json"
SEEDS = (0, 1, 2)


def unscaled(model: nn.Module) -> None:
    """Set the scale of every attention to one."""
    for block in model.blocks:
        block.attention.scale = "unscaled"


def wide(model: nn.Module) -> None:
    """Initialise query and key weights with eight times their usual standard deviation."""
    for block in model.blocks:
        for projection in (block.attention.query, block.attention.key):
            nn.init.normal_(projection.weight, std=8 * projection.in_features**-0.5)


@dataclass(frozen=True)
class Bug:
    """A run that goes wrong, and the same run without its bug."""

    name: str
    case: Case
    reference: Case
    spoil: Callable[[nn.Module], None] = lambda model: None


FAST = Case("0.1", 0.1, steps=160, every=5, schedule=warmed)
CALM = Case("3e-3", 3e-3, steps=160, every=5, d_model=64, heads=1)
BUGS = (
    Bug("learning rate 0.1", FAST, replace(FAST, qk_norm=True)),
    Bug("learning rate 0.3", replace(FAST, rate=0.3), replace(FAST, rate=0.3, qk_norm=True)),
    Bug("0.3, scores in float16", replace(FAST, rate=0.3, half=True), replace(FAST, rate=0.3, qk_norm=True)),
    Bug(
        "learning rate × 100 half-way",
        replace(FAST, rate=0.3, schedule=accident),
        replace(FAST, rate=0.3, schedule=accident, qk_norm=True),
    ),
    Bug("no scale", CALM, CALM, unscaled),
    Bug("projections 8 times too wide", CALM, CALM, wide),
)
HEALTHY = (
    Case("width 64, 1e-3", 1e-3, d_model=64, steps=160, every=5),
    Case("width 48, 3e-3", 3e-3, steps=160, every=5),
    Case("depth 4, 2e-3", 2e-3, layers=4, steps=160, every=5),
    Case("warm-up and cosine, 3e-3", 3e-3, schedule=cosine, steps=160, every=5),
    Case("weight decay 0.1, 3e-3", 3e-3, weight_decay=0.1, steps=160, every=5),
    Case("QK-norm, 1e-2", 1e-2, qk_norm=True, steps=160, every=5),
    Case("encoder, 1e-3", 1e-3, d_model=32, start="encoder", steps=160, every=5),
    Case("trained model, 1e-4", 1e-4, start="bundled", length=64, batch=8, steps=80, every=5),
)


def train(
    case: Case, seed: int, text: torch.Tensor, spoil: Callable[[nn.Module], None] = lambda model: None
) -> tuple[list[float], list[tuple[int, str, str]]]:
    """Return the smoothed loss of a run, and step, code and severity of its alarms."""
    torch.manual_seed(seed)
    model = model_of(case)
    spoil(model)
    optimizer = torch.optim.AdamW(model.parameters(), case.rate, betas=(0.9, 0.95), weight_decay=case.weight_decay)
    generator, losses = torch.Generator().manual_seed(seed), list[float]()
    alarms: list[tuple[int, str, str]] = []
    monitor = Monitor(
        model,
        case.every,
        sinks=[lambda record: alarms.extend((record.step, each.code, each.severity) for each in record.alarms)],
    )
    for step in range(case.steps):
        for group in optimizer.param_groups:
            group["lr"] = case.rate * case.schedule(step, case.steps)
        starts = torch.randint(0, len(text) - case.length - 1, (case.batch,), generator=generator)
        loss = loss_of(case, model, text[starts[:, None] + torch.arange(case.length + 1)], generator)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        monitor.step(loss=losses[-1])
        if not math.isfinite(losses[-1]):
            break
    monitor.close()
    return smoothed(losses), alarms


def result(name: str, seed: int, alarms: list[tuple[int, str, str]], departs: int | None) -> dict[str, Any]:
    """Return the record of a run: its first alarm, and the step at which its loss departs."""
    first = next((alarm for alarm in alarms if alarm[2] != "note"), None)
    return {
        "run": name, "seed": seed, "alarm": None if first is None else first[0],
        "code": None if first is None else first[1], "departs": departs,
        "alarms": sum(severity != "note" for *_, severity in alarms),
        "notes": sum(severity == "note" for *_, severity in alarms),
    }  # fmt: skip


def is_in_time(run: dict[str, Any]) -> bool:
    """Return True if the alarm came before the loss departed."""
    return run["alarm"] is not None and run["departs"] is not None and run["alarm"] < run["departs"]


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown: a line for each bug, then the count of healthy runs without an alarm."""
    lines = ["| bug | alarm at step | of kind | loss departs at step |", "|---|---|---|---|"]
    for name in dict.fromkeys(run["run"] for run in found["bad"]):
        runs = [run for run in found["bad"] if run["run"] == name]
        columns = (
            ", ".join("–" if run["alarm"] is None else str(run["alarm"]) for run in runs),
            ", ".join(dict.fromkeys(f"`{run['code']}`" for run in runs if run["code"])),
            ", ".join("never" if run["departs"] is None else str(run["departs"]) for run in runs),
        )
        lines.append(f"| {name} | {' | '.join(columns)} |")
    in_time, quiet = sum(map(is_in_time, found["bad"])), sum(run["alarms"] == 0 for run in found["healthy"])
    lines += ["", f"{in_time} of {len(found['bad'])} alarms came before the loss departed. "
              f"{quiet} of {len(found['healthy'])} healthy runs raised none."]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    """Train, print one line per run, record the results, and print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    arguments.add_argument("--out", type=Path, default=RESULTS)
    arguments.add_argument("--table", action="store_true", help="print the recorded results, and train nothing")
    given = arguments.parse_args()
    if given.table:
        print(table(json.loads(given.out.read_text(encoding="utf-8"))))
        return
    torch.set_num_threads(1)  # such small matrices are no faster on two threads
    logging.getLogger("attnscale").setLevel(logging.ERROR)
    text, start = encode(default_text()), time.perf_counter()
    found: dict[str, Any] = {"bad": [], "healthy": []}
    for seed in given.seeds:
        for bug in BUGS:
            reference, _ = train(bug.reference, seed, text)
            curve, alarms = train(bug.case, seed, text, bug.spoil)
            found["bad"].append(result(bug.name, seed, alarms, departure(curve, reference)))
            print(found["bad"][-1], flush=True)
        for case in HEALTHY:
            _, alarms = train(case, seed, text)
            found["healthy"].append(result(case.name, seed, alarms, None))
            print(found["healthy"][-1], flush=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found), f"{time.perf_counter() - start:.0f} s", sep="\n\n")


if __name__ == "__main__":
    main()
