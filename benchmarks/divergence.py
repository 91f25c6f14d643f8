"""Test if alarms come before the loss departs, and which fixes prevent that: `python benchmarks/divergence.py`

A small transformer is trained on Python's help texts with Adam, at a learning rate that suits it and at rates where
scores grow: without a fix and with each fix, over a few seeds. Losses are smoothed over 20 steps. The loss of a run
departs at the first step from which it stays 0.1 nats above the loss of the same seed and rate with a QK-norm, or is
not finite. attnscale.Monitor raises the alarms, and attnscale.QKClip clips at every step. Results go to
benchmarks/results/divergence.json.

With `--scores float16`, products of queries and keys are computed in half precision. A run ends when they exceed its
largest number, 65,504. This attention is written out, so QKClip traces every step, and the step runs uncompiled even
with `--compiled`, which compiles the model. With float32 scores, QKClip measures inside the compiled graph.
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

from attnscale import Monitor, QKClip
from attnscale.models import CausalTransformer, default_text, encode
from attnscale.models.transformer import CausalSelfAttention, Turns, rotate

CLIPPED = 100.0
VOCABULARY, LAYERS, HEADS, D_MODEL, LENGTH, BATCH = 256, 2, 2, 48, 32, 16
EVERY, SMOOTH, DEPARTURE = 5, 20, 0.1
REFERENCE = "QK-norm"
FIXES = {REFERENCE: {"qk_norm": True}, "none": {}, "soft-cap 50": {"softcap": 50.0}, "QK-Clip 100": {}}
RESULTS = Path(__file__).parent / "results" / "divergence.json"


class HalfScores(CausalSelfAttention):
    """Attention written out, with scores in half precision."""

    def forward(self, x: torch.Tensor, turns: Turns | None = None) -> torch.Tensor:
        """Project, rotate, attend, project back."""
        query = rotate(self.query_norm(self._split(self.query(x))), turns).half()
        key = rotate(self.key_norm(self._split(self.key(x))), turns).half()
        scores = query @ key.mT * self.head_dim**-0.5
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(x.dtype)
        return self.output((weights @ self._split(self.value(x))).transpose(1, 2).flatten(2))


def train(
    fix: str, rate: float, seed: int, steps: int, text: torch.Tensor, scores: str, compiled: str | None = None
) -> dict:
    """Train once; return losses, largest scores and alarms. `compiled` names the backend of torch.compile."""
    torch.manual_seed(seed)
    model = CausalTransformer(VOCABULARY, D_MODEL, LAYERS, HEADS, **FIXES[fix])
    if scores == "float16":
        for block in model.blocks:
            block.attention.__class__ = HalfScores
    run = model if compiled is None else torch.compile(model, backend=compiled)
    optimizer = torch.optim.Adam(model.parameters(), rate, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    losses, largest, alarms = [], [], []
    clip = QKClip(model, CLIPPED) if fix.startswith("QK-Clip") else None
    sinks = [
        lambda record: largest.append((record.step, max(layer.whole("max") for layer in record.layers.values()))),
        lambda record: alarms.extend((record.step, alarm) for alarm in record.alarms),
    ]
    monitor = Monitor(model, every=EVERY, sinks=sinks)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50)  # a short warm-up, as in most training runs
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=generator)
        tokens = text[starts[:, None] + torch.arange(LENGTH + 1)]
        loss = F.cross_entropy(run(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if clip is not None:
            clip.step()
        monitor.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
    monitor.close()
    is_inside = None if clip is None else clip.is_inside
    if clip is not None:
        clip.close()
    curve, first = smoothed(losses), {}
    for step, alarm in alarms:
        first.setdefault(alarm.code, step)
    crossed = {limit: next((step for step, value in largest if value >= limit), None) for limit in (100, 1000, 10_000)}
    return {
        "fix": fix, "rate": rate, "seed": seed, "last_loss": curve[-1],
        "finite": math.isfinite(losses[-1]), "steps": len(losses),
        "largest_score": max((value for _, value in largest if not math.isnan(value)), default=math.nan),
        "largest": [[step, float(f"{value:.4g}")] for step, value in largest], "alarms": first, "crossed": crossed,
        "curve": curve, "clipped_inside": is_inside,
    }  # fmt: skip


def smoothed(losses: list[float]) -> list[float]:
    """Return running means over SMOOTH steps."""
    return [statistics.fmean(losses[max(0, at - SMOOTH + 1) : at + 1]) for at in range(len(losses))]


def departure(curve: list[float], reference: list[float]) -> int | None:
    """Return the first step from which a curve stays DEPARTURE above `reference`; None if it ends below that."""
    behind = [
        value > other + DEPARTURE or not math.isfinite(value) for value, other in zip(curve, reference, strict=False)
    ]
    last_well = max((step for step, is_behind in enumerate(behind) if not is_behind), default=-1)
    return last_well + 1 if last_well + 1 < len(behind) else None


def finite(plain: object) -> object:
    """Return a value with None for each number that is not finite, as JSON needs."""
    if isinstance(plain, dict):
        return {key: finite(value) for key, value in plain.items()}
    if isinstance(plain, list):
        return [finite(value) for value in plain]
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain


def main() -> None:
    """Train, print one line per run, and record the runs."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rates", type=float, nargs="+", default=[0.003, 0.1, 0.3])
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--scores", choices=("float32", "float16"), default="float32")
    arguments.add_argument("--compiled", nargs="?", const="inductor", metavar="BACKEND", help="compile the model")
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--out", type=Path, default=RESULTS)
    given = arguments.parse_args()
    torch.set_num_threads(1)  # such small matrices are no faster on two threads
    logging.getLogger("attnscale").setLevel(logging.ERROR)
    text, runs, reference, start = encode(default_text()), [], [], time.perf_counter()
    for rate, seed in itertools.product(given.rates, given.seeds):
        for fix in FIXES:
            run = train(fix, rate, seed, given.steps, text, given.scores, given.compiled)
            curve = run.pop("curve")
            reference = curve if fix == REFERENCE else reference
            run["departs"] = departure(curve, reference)
            runs.append(run)
            print(
                f"rate {rate:g}, seed {seed}, {fix}: loss {run['last_loss']:.2f} at step {run['steps'] - 1}, "
                f"departs at {run['departs']}; "
                f"largest score {run['largest_score']:.3g}, first alarms {run['alarms']}, passed {run['crossed']}",
                flush=True,
            )
    shape = {"layers": LAYERS, "heads": HEADS, "d_model": D_MODEL, "length": LENGTH, "batch": BATCH}
    settings = {"scores": given.scores, "compiled": given.compiled, "steps": given.steps}
    given.out.write_text(json.dumps(finite({**shape, **settings, "runs": runs})) + "\n", encoding="utf-8")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
