"""Growth of the scores with the learning rate, its cost, and the effect of QK-norm and QK-Clip.

After Wortsman et al. 2023, arXiv:2309.14322, at a size that a laptop trains in seconds.
"""

import math
from collections.abc import Sequence
from typing import Any

from attnscale.acting import clip_qk_
from attnscale.lab.experiment import Conclusion, Experiment, Outcome, Setting, Settings
from attnscale.lab.outcomes import Band, Outcomes, band, diverged_sentence, is_below_zero
from attnscale.lab.result import Check, Plot, Table, column
from attnscale.lab.tasks import TASKS
from attnscale.lab.training import Schedule, Step, seeded_model, trained
from attnscale.plain import readable
from attnscale.train import Monitor, Record

PLAIN, NORM, CLIP = "plain", "QK-norm", "QK-Clip"
FIXES: dict[str, dict[str, Any]] = {PLAIN: {}, NORM: {"qk_norm": True}, CLIP: {}}
THRESHOLD = 100.0  # Kimi K2's
DIVERGES = 1e4  # the largest score from which Wortsman et al. saw runs diverge
LEAST = 3  # steps between two measurements
MEASUREMENTS = 20  # in a run; QK-Clip measures every step


def grid(quick: bool) -> Sequence[Settings]:
    """List every fix at every rate."""
    if quick:
        rates, size = [0.003, 0.3], {"steps": 30, "d_model": 32, "heads": 1, "head_dim": 32}
    else:
        rates = [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3]  # Wortsman et al.'s range
        size = {"steps": 400, "d_model": 64, "heads": 2, "head_dim": 32}
    return [{"task": "characters", "fix": fix, "rate": rate, **size} for fix in (CLIP, PLAIN, NORM) for rate in rates]


def run(
    task: str, fix: str, rate: float, steps: int, d_model: int, heads: int, head_dim: int, seed: int,
    device: str = "cpu",
) -> Outcome:  # fmt: skip
    """Train one model, and follow its largest score and whether norms or alignment grow."""
    of, every = TASKS[task], max(LEAST, steps // MEASUREMENTS)
    model = seeded_model(of.vocabulary, seed, d_model=d_model, heads=heads, head_dim=head_dim, **FIXES[fix]).to(device)
    monitor = Monitor(model, every=1 if fix == CLIP else every, rows=None)

    def clip(step: Step) -> None:
        if fix == CLIP and step.record is not None and _largest(step.record) > THRESHOLD:
            clip_qk_(model, monitor, THRESHOLD)

    found = trained(model, of, Schedule(steps, rate, seed), monitor, after_step=clip)
    records = [record for record in found.records if record.step % every == 0]
    first, last = records[0], records[-1]
    return {
        "start": found.start, "final": found.final, "diverged": found.diverged,
        "max_score": max(map(_largest, records)),
        "norm_growth": _norms(last) / _norms(first), "alignment_growth": _alignment(last) / _alignment(first),
    }  # fmt: skip


def _largest(record: Record) -> float:
    return max(layer.whole("max") for layer in record.layers.values())


def _norms(record: Record) -> float:
    return max(layer.whole("query_norm") * layer.whole("key_norm") for layer in record.layers.values())


def _alignment(record: Record) -> float:
    return max(layer.whole("alignment") for layer in record.layers.values())


def conclude(outcomes: Outcomes) -> Conclusion:
    """Say how far scores grow, and if a fix makes the learning rate matter less."""
    rates = sorted(outcomes.values("rate"))
    scores = {fix: [_logs(outcomes, "max_score", fix=fix, rate=rate) for rate in rates] for fix in FIXES}
    sensitivity = {fix: _sensitivities(outcomes.where(fix=fix)) for fix in FIXES}
    gains = {fix: _gain(sensitivity[fix], sensitivity[PLAIN]) for fix in (NORM, CLIP)}
    norms, alignment = (
        _logs(outcomes, f"{name}_growth", fix=PLAIN, rate=rates[-1]) for name in ("norm", "alignment")
    )  # fmt: skip
    lowest, highest = scores[PLAIN][0], scores[PLAIN][-1]
    text = " ".join([
        f"From a rate of {rates[0]:g} to {rates[-1]:g} the largest score of the plain model grows from "
        f"{_factor(lowest)} to {_factor(highest)}; with QK-norm it is {_factor(scores[NORM][-1])} at the highest rate, "
        f"with QK-Clip {_factor(scores[CLIP][-1])}.",
        f"At {rates[-1]:g} ‖q‖‖k‖ grows {_factor(norms)} times during training and the alignment of q and k "
        f"{_factor(alignment)} times.",
        f"Averaged over all rates, a run loses {band(sensitivity[PLAIN].values())} nats against the best rate; "
        + "; ".join(f"{fix} {_on_gain(gain)}" for fix, gain in gains.items()) + ".",
        diverged_sentence(outcomes),
    ])  # fmt: skip
    beyond = Outcomes([cell for cell in outcomes if cell[1]["max_score"] > DIVERGES])
    checks = [
        Check("the largest score grows with the rate", highest.low > lowest.high,
              f"{_factor(lowest)} to {_factor(highest)}"),
        Check("QK-norm keeps scores below those of the plain model at the highest rate",
              scores[NORM][-1].high < highest.low, f"{_factor(scores[NORM][-1])} against {_factor(highest)}"),
        *(Check(f"{fix} makes the loss depend less on the rate", is_below_zero(gain), f"sensitivity {gain:+.2g}")
          for fix, gain in gains.items()),
        Check("scores grow by norms, not alignment", norms.low > alignment.high,
              f"{_factor(norms)} against {_factor(alignment)} times"),
    ]  # fmt: skip
    if len(beyond):
        count = beyond.count("diverged")
        checks.append(Check(f"every run whose scores pass {DIVERGES:,.0f} diverges", count == len(beyond),
                            f"{count} of {len(beyond)} runs have a loss no lower than at the start"))  # fmt: skip
    return Conclusion(text, tuple(checks), _tables(outcomes, rates, sensitivity, gains), _plots(outcomes))


def _logs(outcomes: Outcomes, measure: str, **settings: Setting) -> Band:
    """Return the mean of log₁₀ over seeds, for numbers that differ by factors."""
    return band(math.log10(value) for value in outcomes.samples(measure, **settings))


def _factor(logs: Band) -> str:
    return readable(10**logs.mean)


def _sensitivities(own: Outcomes) -> dict[int, float]:
    """Return Wortsman et al.'s measure by seed: the mean over rates of min(loss, loss at the start) − the lowest."""
    found = {}
    for seed in own.values("seed"):
        losses = [min(run["final"], run["start"]) for _, run in own.where(seed=seed)]
        found[seed] = math.fsum(losses) / len(losses) - min(losses)
    return found


def _gain(one: dict[int, float], other: dict[int, float]) -> Band:
    return band((one[seed] - other[seed] for seed in one), points=len(FIXES) - 1)


def _on_gain(gain: Band) -> str:
    if gain.seeds < 2:
        return f"changes that by {gain.mean:+.2g}, which one seed cannot tell from chance"
    change = "lowers that" if gain.high < 0 else "raises that" if gain.low > 0 else "makes no difference to that"
    return f"{change} ({gain:+.2g})"


def _tables(
    outcomes: Outcomes, rates: Sequence[float], sensitivity: dict[str, dict[int, float]], gains: dict[str, Band]
) -> tuple[Table, ...]:
    rows = []
    for rate in rates:
        for fix in FIXES:
            at = outcomes.where(fix=fix, rate=rate)
            factors = (10 ** _logs(at, name).mean for name in ("max_score", "norm_growth", "alignment_growth"))
            final = at.band("final")
            rows.append((rate, fix, *column([*factors, final.mean, final.margin]), at.count("diverged")))
    columns = ("rate", "fix", "largest score", "growth of ‖q‖‖k‖", "of alignment", "final loss", "±", "diverged")
    summary = []
    for fix, own in ((fix, band(sensitivity[fix].values())) for fix in FIXES):
        gain = column([gains[fix].mean, gains[fix].margin]) if fix in gains else (None, None)
        summary.append((fix, *column([own.mean, own.margin]), *gain))
    return (
        Table("Largest score and loss against the rate; geometric means over seeds", columns, tuple(rows)),
        Table("Learning-rate sensitivity: mean loss above that of the best rate, nats",
              ("fix", "sensitivity", "±", "more than plain", "±"), tuple(summary)),
    )  # fmt: skip


def _plots(outcomes: Outcomes) -> tuple[Plot, ...]:
    return (
        Plot("Largest score against the rate", "learning rate", "largest score",
             outcomes.curves("rate", "max_score", "fix"),
             f"Wortsman et al. saw runs diverge beyond {DIVERGES:,.0f}.", log_x=True, log_y=True),
        Plot("Final loss against the rate", "learning rate", "held-out loss, nats",
             outcomes.curves("rate", "final", "fix"), "The wider the valley, the easier to tune.", log_x=True),
    )  # fmt: skip


EXPERIMENT = Experiment(
    "growth", "How do scores grow with the learning rate, and do QK-norm and QK-Clip help?",
    grid, run, conclude, seeds=8, quick_seeds=3, trains=True, core_minutes=28,
)  # fmt: skip
