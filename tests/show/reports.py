"""Reports of every kind, made quickly: a check, a log, an experiment, twin runs."""

import math
from dataclasses import replace

import numpy as np
import torch

from attnscale.checking import Checked
from attnscale.comparing import LayerProfile, Profile, compare_profiles
from attnscale.comparing.profiles import COMPARED
from attnscale.diagnose import Finding, diagnose
from attnscale.lab.demo import TwinRun, Twins
from attnscale.lab.experiment import Check, Curve, Heatmap, Plot, Result, Table
from attnscale.measure.statistics import logged
from attnscale.train.record import LayerRecord, Record
from tests.diagnose.layers import layer_of

EVIL = "</script><img src=x onerror=alert(1)>"


def layers_of(names, heads=3, length=23, head_dim=11, scale=None, rows=None):
    """Random layers, each spreading a little wider than the one before it."""
    made = {}
    for index, name in enumerate(names):
        query, key = (torch.randn(1, heads, length, head_dim) for _ in range(2))
        made[name] = replace(layer_of((1 + index / 5) * query, key, scale, causal=True), name=name)
        if rows is not None:
            from attnscale import score_stats

            stats = score_stats((1 + index / 5) * query, key, is_causal=True, rows=rows)
            made[name] = replace(made[name], stats=stats)
    return made


def checked(names=("blocks.0.attention", "blocks.1.attention"), title="a model", rows=None, **options):
    audit = diagnose(layers_of(names, rows=rows, **options), trained=False)
    return Checked(title, "random tokens", "cpu", rows, (), audit)


def records(names=("blocks.0.attention", "blocks.1.attention"), rate=0.005, steps=range(0, 1000, 50), alarm=True):
    """A run whose last layer grows by exp(rate) a step and passes 100 at step 600; an alarm is told at 750."""
    found = []
    for step in steps:
        growing = 5.0 * math.exp(rate * step)
        maxima = [5.0] * (len(names) - 1) + [growing]
        layers = {
            name: LayerRecord(
                64,
                {key: [0.5, 0.25] for key in logged()}
                | {"max": [value, 1.0], "max_above_mean": [value, 1.0], "max_bound": [2 * value, 2.0]},
                keys=23.0,
            )
            for name, value in zip(names, maxima, strict=True)
        }
        told = Finding(names[-1], 0, "exploding", "note", "The largest score is 101.", 101.0, 100.0, "Clip it.")
        learned = {"loss": 3.0 - step / 1000, "lr": 1e-3}
        found.append(Record(step, float(step), layers, [told] if alarm and step == 750 else [], **learned))
    return found


def compared(names=("blocks.0.attention", "blocks.1.attention"), title="a model"):
    """Two profiles of these layers, in the second of which a head spreads twice as wide, and a finding came."""
    random = np.random.default_rng(0)
    sides = []
    for factor in (1.0, 2.0):
        layers = {name: {each: random.normal(1.0, 0.01, (8, 3)) for each in COMPARED} for name in names}
        layers[names[0]]["spread"][:, 1] *= factor
        came = [Finding(names[0], 1, "sharp", "warning", f"{title} spreads.", 2.0, 1.0, "Look at it.")]
        profiles = {name: LayerProfile(samples) for name, samples in layers.items()}
        sides.append(Profile(title, "eight sequences", profiles, tuple(came if factor > 1 else ())))
    return compare_profiles(*sides)


def result(name="d_k"):
    return Result(
        experiment="variance",
        question=f"Does the variance grow with {name}?",
        conclusion="It grows as d_k, within 0.4%.",
        checks=(Check("the variance is d_k", True, "slope 1.004"), Check("the kurtosis is 3", False, "6 at d_k = 1")),
        tables=(Table("By width", (name, "initialisation", "variance"), ((1, "normal", 1.0123456), (64, EVIL, None))),),
        plots=(
            Plot(
                "Variance", name, "variance",
                (
                    Curve("measured", (1.0, 4.0, 16.0), (1.0, 4.1, 15.9), (0.9, 3.9, 15.0), (1.1, 4.4, 17.0)),
                    Curve("theory", (1.0, 16.0), (1.0, 16.0), is_theory=True),
                ),
                "They lie on one line.", log_x=True, log_y=True,
            ),
            Heatmap("Entropy", "keys", "spread", (16, 64), (0.5, 1.0), ((0.9, None), (0.7, 0.8)), "Less below."),
        ),
        settings={"seeds": 3, "torch": "2.13"},
    )  # fmt: skip


def twins(
    names=("blocks.0.attention", "blocks.1.attention"),
    names_of_runs=("scaled", "unscaled"),
    title="Two runs",
):
    runs = []
    for index, name in enumerate(names_of_runs):
        losses = tuple((step, 3.0 * 0.99**step + index) for step in range(200))
        audit = diagnose(layers_of(names, scale=1.0 if index else None), trained=True)
        runs.append(TwinRun(name, losses, tuple(records(names, rate=0.004 * index)), audit))
    return Twins(title, "One of them learns.", ("It is so because it is.",), tuple(runs), {"steps": 200})
