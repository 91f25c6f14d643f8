"""The reports of `attnscale check` and `attnscale compare`."""

import math
from collections.abc import Iterator

from attnscale.checking import Checked, Group
from attnscale.comparing import Comparison, HeadChange
from attnscale.comparing.backend_comparison import BackendComparison
from attnscale.comparing.profiles import COMPARED, RATIOS
from attnscale.comparing.statistic_change import LEVEL
from attnscale.diagnose.finding import grouped
from attnscale.measure.statistics import STATISTICS, Place, in_place
from attnscale.show.page import Axis, Figure, Heat, Note, Page, Section, render, ticks
from attnscale.show.report.heads import (
    concentrated_heads,
    critical_spreads,
    head_map,
    padded,
    record_of,
    sampling_of,
    score_histograms,
    spreads_of,
)
from attnscale.show.tables import backend_table, layer_table, what_if_table
from attnscale.show.text import place
from attnscale.watching.seen import padding_note

CRITICAL_SPREAD = {"critical spread": "√(2 ln n): if n scores spread wider, a few keys take most of the weight"}
OF_MODELS = {
    "expected spread": "spread for independent queries and keys of the measured norms: "
    "expected scale · ‖q‖ · ‖k‖ / √d_k",
    "scale": f"{STATISTICS['scale_applied'].meaning}; {STATISTICS['scale_applied'].reading}",
}


def report_page(checked: Checked) -> str:
    """Return the report of a check as a string."""
    return render(check_report(checked))


def check_report(checked: Checked) -> Page:
    """Return the report of a check as a Page."""
    unchecked = checked.audit.unchecked
    return Page(
        kind="attnscale check",
        title=checked.title,
        verdict=checked.conclusion,
        tone=checked.audit.worst or "fine",
        notes=tuple(map(note_of, checked.groups)),
        sections=(
            *(_of_layers(checked) if checked.lines else ()),
            *((Section("unchecked", "What was not judged", unchecked),) if unchecked else ()),
            _method(checked),
        ),
    )


def note_of(group: Group, where: str = "") -> Note:
    """Return the note for a group of equal findings."""
    first = group.first
    return Note(first.severity, first.severity, first.message, first.code, where or place(group), first.advice)


def _of_layers(checked: Checked) -> Iterator[Section]:
    layers = checked.audit.layers
    footnotes = tuple(f"{word}: {meaning}" for word, meaning in checked.footnotes.items())
    yield Section("layers", "Layer by layer", (layer_table(checked.lines), *footnotes))
    records = {name: record_of(layer) for name, layer in layers.items()}
    heads = head_map("head-map", records, [layer.stats for layer in layers.values()])
    yield Section("heads", "Head by head", ((heads,),))
    if (histograms := score_histograms("score-histograms", layers)) is not None:
        yield Section("scores", "Distribution of the scores", ((histograms,),))
    spreads = critical_spreads("critical-spreads", spreads_of(records))
    yield Section("critical-spread", "Spread and critical spread", ((spreads,),))
    if (weights := concentrated_heads("sharp-heads", layers)) is not None:
        text = "Weights in the first sequence; each row is a query."
        yield Section("sharp", "Weights of heads beyond the critical spread", (text, (weights,)))
    if checked.what_if is not None:
        text = (
            f"Computed from the queries, keys and values of {checked.focus} in this forward pass, with its own masks "
            "and biases. Output change is relative to the norm of the output; a dash means no values could be read."
        )
        yield Section("what-if", "The layer under other scales", (text, what_if_table(checked.what_if)))


def words_of_models() -> dict[str, str]:
    """Return the glossary of a report on a model."""
    return meanings(Place.CHECK | Place.MAP) | OF_MODELS | CRITICAL_SPREAD


def meanings(places: Place) -> dict[str, str]:
    """Return the meanings of the statistics that are shown in these places."""
    return {entry.long: entry.meaning for entry in in_place(places)}


def _method(checked: Checked) -> Section:
    rows = "every row of every head" if checked.rows is None else f"{checked.rows} sampled rows of every head"
    state = "trained" if checked.audit.trained else "at initialisation"
    setup = (
        f"One forward pass on {checked.fed}, on {checked.device}, which measured {rows}. Judged by its norms "
        f"and biases, the model is {state}."
    )
    padding = padding_note(checked.audit.layers.values())
    text = " ".join([setup, *padding, *checked.notes])
    return Section("method", "How it was measured", (text, sampling_of(checked.audit.layers), words_of_models()))


def comparison_page(comparison: Comparison | BackendComparison) -> str:
    """Return the report of a comparison as a string."""
    if isinstance(comparison, BackendComparison):
        return render(backends_report(comparison))
    return render(comparison_report(comparison))


def comparison_report(comparison: Comparison) -> Page:
    """Return the report of a comparison of two models as a Page."""
    new = [note_of(group) for group in grouped(comparison.new)]
    gone = [note_of(group) for group in grouped(comparison.gone)]
    method = (
        "Every head was measured on several sequences, or in the latest records of a run; ± is the standard error of "
        "the change, estimated from the variation between them. If both models ran on the same sequences, it is the "
        f"error of the paired differences. A change is listed if it is larger than {comparison.tolerance:g} (relative; "
        "absolute for shares) and larger than its error: if nothing changed, the probability that any head is listed "
        f"is {LEVEL:.0%} (Student, Welch, Holm). If the parameters that compute a head's queries and keys are equal "
        "bit for bit, its change comes from its inputs."
    )
    return Page(
        kind="attnscale compare",
        title=f"{comparison.before} → {comparison.after}",
        verdict=comparison.conclusion,
        tone="warning" if comparison.worse else "fine",
        notes=(
            *(Note(note.tone, "new", note.message, note.code, note.place, note.advice) for note in new),
            *(Note("fine", "gone", note.message, note.code, note.place) for note in gone),
            *map(_change, comparison.changed),
        ),
        sections=(_heads(comparison), Section("method", "How it was compared", (method, *comparison.notes))),
    )


def backends_report(comparison: BackendComparison) -> Page:
    """Return the report of a comparison of backends as a Page."""
    notes = [
        Note("warning", "differs", f"{each.message}.", each.what, f"{row.layer}, {row.backend}")
        for row in comparison.differing
        for each in row.differences
    ]
    method = (
        f"The same weights and the same batch ({comparison.fed}) ran once with each backend, in evaluation mode. "
        "Output change compares the output of the layer's module with that under the first backend, without padding. "
        "A layer is not listed for its output if its inputs had already changed."
    )
    return Page(
        kind="attnscale compare --backends",
        title=comparison.title,
        verdict=comparison.conclusion,
        tone="fine" if comparison.is_compared and comparison.first is None else "warning",
        notes=tuple(notes),
        sections=(
            *((Section("layers", "Layer by layer", (backend_table(comparison),)),) if comparison.rows else ()),
            Section("method", "How it was compared", (method, *comparison.remarks)),
        ),
    )


def _change(head: HeadChange) -> Note:
    tone = "warning" if head.worse else "note"
    return Note(tone, "changed", f"{head.text}.", "", head.place, f"{head.by_factor}.")


def _heads(comparison: Comparison) -> Section:
    heads = comparison.heads
    measured = [name for name in COMPARED if any(name in head.moves for head in heads)]
    shown = [name for name in measured if any(head.moves[name].size for head in heads if name in head.moves)]
    same = [STATISTICS[name].long for name in measured if name not in shown]
    views = {STATISTICS[name].long: _map(comparison, name) for name in shown}
    figures = ((Figure("change-map", views, choose="Colour heads by the change of"),),) if views else ()
    unchanged = (f"The same in all heads: {', '.join(same)}.",) if same else ()
    return Section("heads", "Head by head", (*figures, *unchanged))


def _map(comparison: Comparison, statistic: str) -> Heat:
    names = tuple(dict.fromkeys(head.layer for head in comparison.heads))
    entry, is_ratio = STATISTICS[statistic], statistic in RATIOS
    changes, errors = [], []
    for name in names:
        moves = [head.moves.get(statistic) for head in comparison.heads if head.layer == name]
        changes.append([math.nan if move is None else entry.factor * move.change for move in moves])
        errors.append([math.nan if move is None else entry.factor * move.error for move in moves])
    known = [head for head in comparison.heads if statistic in head.moves]
    most = max(known, key=lambda head: head.moves[statistic].size)
    beyond = sum(head.moves[statistic].is_significant for head in known)
    widest = entry.factor * most.moves[statistic].size or 1.0
    return Heat(
        values=padded(changes),
        x=Axis("head"),
        y=Axis("layer", ticks=ticks(names)),
        unit=f"ln(after/before) of {entry.long}" if is_ratio else f"change of {entry.long}",
        rows=names,
        low=-widest,
        high=widest,
        diverging=True,
        notice=(
            f"{'Logarithm of the ratio; red' if is_ratio else 'Red'} is more than before, blue is less. "
            f"The {entry.long} changed most in head {most.head} of {most.layer}, {most.moves[statistic].text}; "
            f"it changed by more than its error in {beyond} of {len(known)} heads."
        ),
        errors=padded(errors),
    )
