"""How do scores grow with the learning rate, what does it cost, and what do QK-norm and QK-Clip do about it?

After Wortsman et al. 2023, arXiv:2309.14322, at a scale that a laptop trains in seconds.
"""

import math
from collections.abc import Sequence
from typing import Any

from attnscale.acting import clip_qk_
from attnscale.lab.bands import Band, Factors, band, geometric_band
from attnscale.lab.cell import Outcome, Setting, Settings
from attnscale.lab.experiment import Conclusion, Experiment
from attnscale.lab.outcomes import Outcomes, banded
from attnscale.lab.result import Check, Plot, Table, column
from attnscale.lab.tasks import TASKS
from attnscale.lab.training import Schedule, Step, seeded_model, trained
from attnscale.plain import readable
from attnscale.train import Monitor, Record

PLAIN, NORM, CLIP = "plain", "QK-norm", "QK-Clip"
FIXES: dict[str, dict[str, Any]] = {PLAIN: {}, NORM: {"qk_norm": True}, CLIP: {}}
THRESHOLD = 100.0  # Kimi K2's
DETERIORATES, DIVERGES = 1e3, 1e4  # the largest scores from which Wortsman et al. saw runs do so
LEAST = 3  # steps between two looks
LOOKS = 20  # at the scores in a run; QK-Clip looks at every step


def grid(quick: bool) -> Sequence[Settings]:
    """Every fix at every rate."""
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
    """Final loss, the largest score on the way, and whether norms or alignment grew."""
    of, every = TASKS[task], max(LEAST, steps // LOOKS)
    model = seeded_model(of.vocabulary, seed, d_model=d_model, heads=heads, head_dim=head_dim, **FIXES[fix]).to(device)
    monitor = Monitor(model, every=1 if fix == CLIP else every, rows=None)

    def clip(step: Step) -> None:
        if fix == CLIP and step.record is not None and _largest(step.record) > THRESHOLD:
            clip_qk_(model, monitor, THRESHOLD)

    found = trained(model, of, Schedule(steps, rate, seed), monitor, between=clip)
    records = [record for record in found.records if record.step % every == 0]
    first, last = records[0], records[-1]
    return {
        "start": found.start, "final": found.final, "diverged": found.diverged,
        "max_score": max(map(_largest, records)), "first_score": _largest(first), "last_score": _largest(last),
        "norm_growth": _norms(last) / _norms(first), "alignment_growth": _alignment(last) / _alignment(first),
    }  # fmt: skip


def _largest(record: Record) -> float:
    return max(layer.whole("max") for layer in record.layers.values())


def _norms(record: Record) -> float:
    return max(layer.whole("query_norm") * layer.whole("key_norm") for layer in record.layers.values())


def _alignment(record: Record) -> float:
    return max(layer.whole("alignment") for layer in record.layers.values())


def conclude(outcomes: Outcomes) -> Conclusion:
    """How far scores grow, where the loss suffers, and whether a fix makes the rate matter less."""
    rates, fixes = sorted(outcomes.values("rate")), [fix for fix in FIXES if fix in outcomes.values("fix")]
    scores = {fix: [_factors(outcomes, "max_score", fix=fix, rate=rate) for rate in rates] for fix in fixes}
    sensitivity = {fix: _sensitivities(outcomes.where(fix=fix)) for fix in fixes}
    gains = {fix: _paired(sensitivity[fix], sensitivity[PLAIN], len(fixes) - 1) for fix in fixes if fix != PLAIN}
    past = {limit: _past(outcomes, limit) for limit in (DETERIORATES, DIVERGES)}
    plain = outcomes.where(fix=PLAIN)
    diverged = sum(found["diverged"] for _, found in outcomes)
    highest = rates[-1]
    norms, alignment = (_factors(plain, f"{name}_growth", rate=highest) for name in ("norm", "alignment"))
    text = (
        f"From a rate of {rates[0]:g} to {highest:g} the largest score of the plain model goes from "
        f"{readable(scores[PLAIN][0].mean)} to {readable(scores[PLAIN][-1].mean)}"
        + "".join(f", with {fix} to {readable(scores[fix][-1].mean)}" for fix in gains)
        + f". {_on_growth(norms, alignment, highest)} {_on_deterioration(outcomes, past[DETERIORATES])} "
        f"Over all rates a run loses {band(sensitivity[PLAIN].values())} nats against the best rate of its kind"
        + "".join(f"; {fix} {_on_gain(gain)}" for fix, gain in gains.items())
        + f". {diverged or 'None'} of {len(outcomes)} runs diverged"
        + _on_divergence(past[DIVERGES])
    )
    checks = _checks(outcomes, scores, gains, past, norms, alignment)
    return Conclusion(text, checks, _tables(outcomes, rates, fixes, sensitivity, gains), _plots(outcomes, fixes))


def _factors(outcomes: Outcomes, measure: str, **settings: Setting) -> Factors:
    return geometric_band(outcomes.samples(measure, **settings))


def _sensitivities(own: Outcomes) -> dict[int, float]:
    """Wortsman et al.'s measure, seed by seed: the mean over rates of min(loss, loss at the start) − the lowest."""
    found = {}
    for seed in own.values("seed"):
        runs = [outcome for _, outcome in own.where(seed=seed)]
        losses = [min(run["final"], run["start"]) for run in runs]
        found[seed] = math.fsum(losses) / len(losses) - min(losses)
    return found


def _paired(one: dict[int, float], other: dict[int, float], points: int) -> Band:
    return band((one[seed] - other[seed] for seed in one), points)


def _past(outcomes: Outcomes, limit: float) -> Outcomes:
    return Outcomes([cell for cell in outcomes if cell[1]["max_score"] > limit])


def _on_divergence(past: Outcomes) -> str:
    if not len(past):
        return f"; no run's scores passed {DIVERGES:,.0f}."
    count = sum(found["diverged"] for _, found in past)
    return f"; of the {len(past)} whose scores passed {DIVERGES:,.0f}, {count or 'none'} did."


def _on_growth(norms: Factors, alignment: Factors, rate: float) -> str:
    leader = "norms" if norms.mean > alignment.mean else "alignment"
    return (
        f"At {rate:g} it grows by {leader}: ‖q‖‖k‖ by a factor of {readable(norms.mean)}, "
        f"the alignment of q and k by {alignment.mean:.2g}."
    )


def _behind(outcomes: Outcomes, past: Outcomes) -> Band:
    """How much more the runs in `past` lose than the QK-norm run of the same rate and seed."""
    return band(
        found["final"] - outcomes.samples("final", fix=NORM, rate=settings["rate"], seed=settings["seed"])[0]
        for settings, found in past
    )


def _on_deterioration(outcomes: Outcomes, past: Outcomes) -> str:
    if not len(past):
        return f"No run's scores passed {DETERIORATES:,.0f}."
    behind = _behind(outcomes, past)
    verdict = "worse" if behind.low > 0 else "better" if behind.high < 0 else "no different"
    return (
        f"Past {DETERIORATES:,.0f} ({len(past)} runs) the loss is {verdict} than with QK-norm at that rate and seed: "
        f"{behind:+.2g} nats."
    )


def _on_gain(gain: Band) -> str:
    if gain.seeds < 2:
        return f"changes that by {gain.mean:+.2g}, which one seed cannot tell from chance"
    change = "lowers that" if gain.high < 0 else "raises that" if gain.low > 0 else "makes no difference to that"
    return f"{change} ({gain:+.2g})"


def _checks(
    outcomes: Outcomes, scores: dict[str, list[Factors]], gains: dict[str, Band], past: dict[float, Outcomes],
    norms: Factors, alignment: Factors,
) -> tuple[Check, ...]:  # fmt: skip
    plain = scores[PLAIN]
    beyond, worse = past[DIVERGES], past[DETERIORATES]
    checks = [
        Check("the largest score grows with the rate", plain[-1].low > plain[0].high, f"{plain[0]} to {plain[-1]}"),
        Check("QK-norm keeps scores below those of the plain model at the highest rate",
              scores[NORM][-1].high < plain[-1].low, f"{scores[NORM][-1]} against {plain[-1]}"),
        Check("QK-norm makes the loss depend less on the rate", gains[NORM].high < 0, f"sensitivity {gains[NORM]}"),
        Check("QK-Clip makes the loss depend less on the rate", gains[CLIP].high < 0, f"sensitivity {gains[CLIP]}"),
        Check("scores grow by norms, not alignment", norms.low > alignment.high, f"{norms} against {alignment}"),
    ]  # fmt: skip
    if len(worse):
        behind = _behind(outcomes, worse)
        checks.append(
            Check(f"the loss deteriorates where scores pass {DETERIORATES:,.0f}", behind.low > 0,
                  f"{behind} nats against QK-norm, {len(worse)} runs")
        )  # fmt: skip
    if len(beyond):
        count = sum(found["diverged"] for _, found in beyond)
        checks.append(
            Check(f"every run whose scores pass {DIVERGES:,.0f} diverges", count == len(beyond),
                  f"{count} of {len(beyond)}: its loss is not finite or no lower than at the start")
        )  # fmt: skip
    return tuple(checks)


def _tables(
    outcomes: Outcomes, rates: Sequence[float], fixes: Sequence[str], sensitivity: dict[str, dict[int, float]],
    gains: dict[str, Band],
) -> tuple[Table, ...]:  # fmt: skip
    rows = []
    for rate in rates:
        for fix in fixes:
            at = outcomes.where(fix=fix, rate=rate)
            score, final = _factors(at, "max_score"), at.band("final")
            growth = (_factors(at, f"{name}_growth").mean for name in ("norm", "alignment"))
            diverged = sum(found["diverged"] for _, found in at)
            numbers = column([score.mean, score.low, score.high, final.mean, final.half, *growth])
            rows.append((rate, fix, *numbers, diverged))
    columns = (
        "rate",
        "fix",
        "largest score",
        "from",
        "to",
        "final loss",
        "±",
        "‖q‖‖k‖ grows by",
        "alignment by",
        "diverged",
    )
    summary = []
    for fix in fixes:
        own = band(sensitivity[fix].values())
        gain = column([gains[fix].mean, gains[fix].half]) if fix in gains else (None, None)
        summary.append((fix, *column([own.mean, own.half]), *gain))
    return (
        Table("Largest score and loss against the rate", columns, tuple(rows)),
        Table("Learning-rate sensitivity: mean loss above that of the best rate, nats",
              ("fix", "sensitivity", "±", "more than plain", "±"), tuple(summary)),
    )  # fmt: skip


def _plots(outcomes: Outcomes, fixes: Sequence[str]) -> tuple[Plot, ...]:
    rates = outcomes.values("rate")
    scores = tuple(
        banded(fix, rates, [_factors(outcomes, "max_score", fix=fix, rate=rate) for rate in rates]) for fix in fixes
    )
    losses = tuple(outcomes.curve(fix, "rate", "final", fix=fix) for fix in fixes)
    return (
        Plot("Largest score against the rate", "learning rate", "largest score", scores,
             f"Wortsman et al. saw runs diverge past {DIVERGES:,.0f}.", log_x=True, log_y=True),
        Plot("Final loss against the rate", "learning rate", "held-out loss, nats", losses,
             "The wider the valley, the less the rate matters.", log_x=True),
    )  # fmt: skip


EXPERIMENT = Experiment(
    "growth",
    "How do scores grow with the learning rate, and do QK-norm and QK-Clip help?",
    grid, run, conclude, seeds=8, quick_seeds=3, trains=True,
core_minutes=28)  # fmt: skip
