"""Does the alarm come before the loss departs, and which fix keeps it? `python benchmarks/divergence.py`

A small transformer is trained on Python's help texts with Adam, at a learning rate that suits it and at rates where
scores grow: plain and with each fix, over a few seeds. The loss of a run departs at the first step from which, smoothed
over 20 steps, it stays 0.1 nats above that of the same seed and rate with a QK-norm, or is not finite. Alarms are those
of attnscale.Monitor, QK-Clip acts on what it sees. Results go to benchmarks/results/divergence.json.
"""

import argparse
import itertools
import json
import logging
import math
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from attnscale import Monitor
from attnscale.acting import clip_qk_
from attnscale.models import CausalTransformer, default_text, encode

VOCABULARY, LAYERS, HEADS, D_MODEL, LENGTH, BATCH = 256, 2, 2, 48, 32, 16
EVERY, SMOOTH, DEPARTURE = 5, 20, 0.1
REFERENCE = "QK-norm"
FIXES = {REFERENCE: {"qk_norm": True}, "none": {}, "soft-cap 50": {"softcap": 50.0}, "QK-Clip 100": {}}
RESULTS = Path(__file__).parent / "results" / "divergence.json"


def train(fix: str, rate: float, seed: int, steps: int, text: torch.Tensor) -> dict:
    """One run: losses, largest scores, alarms."""
    torch.manual_seed(seed)
    model = CausalTransformer(VOCABULARY, D_MODEL, LAYERS, HEADS, **FIXES[fix])
    optimizer = torch.optim.Adam(model.parameters(), rate, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    losses, largest, alarms = [], [], []
    monitor = Monitor(model, every=EVERY)
    monitor.sinks = [
        lambda record: largest.append((record.step, max(layer.whole("max") for layer in record.layers.values()))),
        lambda record: alarms.extend((record.step, alarm) for alarm in record.alarms),
    ]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50)  # a short warm-up, as everyone has
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=generator)
        tokens = text[starts[:, None] + torch.arange(LENGTH + 1)]
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step()
        if fix == "QK-Clip 100" and step % EVERY == 0:
            clip_qk_(model, monitor, threshold=100.0)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
    monitor.close()
    curve, first = smoothed(losses), {}
    for step, alarm in alarms:
        first.setdefault(alarm.code, step)
    crossed = {limit: next((step for step, value in largest if value >= limit), None) for limit in (100, 1000, 10_000)}
    return {
        "fix": fix, "rate": rate, "seed": seed, "last_loss": curve[-1], "finite": math.isfinite(losses[-1]),
        "largest_score": max(value for _, value in largest), "alarms": first, "crossed": crossed, "curve": curve,
    }  # fmt: skip


def smoothed(losses: list[float]) -> list[float]:
    """Running means over SMOOTH steps."""
    return [statistics.fmean(losses[max(0, at - SMOOTH + 1) : at + 1]) for at in range(len(losses))]


def departure(curve: list[float], reference: list[float]) -> int | None:
    """The first step from which a curve stays DEPARTURE above another; None where it does not end there."""
    behind = [
        value > other + DEPARTURE or not math.isfinite(value) for value, other in zip(curve, reference, strict=False)
    ]
    last_well = max((step for step, is_behind in enumerate(behind) if not is_behind), default=-1)
    return last_well + 1 if last_well + 1 < len(behind) else None


def main() -> None:
    """Train, print a line a run, and record them."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rates", type=float, nargs="+", default=[0.003, 0.1, 0.3])
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--out", type=Path, default=RESULTS)
    given = arguments.parse_args()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second
    logging.getLogger("attnscale").setLevel(logging.ERROR)
    text, runs, reference, start = encode(default_text()), [], [], time.perf_counter()
    for rate, seed in itertools.product(given.rates, range(given.seeds)):
        for fix in FIXES:
            run = train(fix, rate, seed, given.steps, text)
            curve = run.pop("curve")
            reference = curve if fix == REFERENCE else reference
            run["departs"] = departure(curve, reference)
            runs.append(run)
            print(
                f"rate {rate:g}, seed {seed}, {fix}: loss {run['last_loss']:.2f} at last, departs at {run['departs']}; "
                f"largest score {run['largest_score']:.3g}, first alarms {run['alarms']}, passed {run['crossed']}",
                flush=True,
            )
    shape = {"layers": LAYERS, "heads": HEADS, "d_model": D_MODEL, "length": LENGTH, "batch": BATCH}
    given.out.write_text(json.dumps({**shape, "steps": given.steps, "runs": runs}, indent=1) + "\n")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
