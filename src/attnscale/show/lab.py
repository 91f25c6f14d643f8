"""Experiments and the demo in the terminal."""

import statistics
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from attnscale.lab.demo import Twins, TwinTraining
from attnscale.lab.experiment import Experiment, Result
from attnscale.plain import printable_lines, readable
from attnscale.show.tables import lab_table, table_of
from attnscale.show.terminal import print_table, say

SMOOTH = 10  # steps to average the loss over; single batches are noisy
EVERY = 20  # steps between two lines of the demo


def show_experiments(experiments: Iterable[Experiment]) -> None:
    """Print a table of the experiments."""
    console = Console()
    rows = ((one.name, one.question, f"{len(one.cells()):,}", readable(one.core_minutes, 2)) for one in experiments)
    print_table(table_of(("experiment", "question", "cells", "minutes\non a core"), rows, text=(0, 1)), console)
    console.print()
    say("Run one with 'attnscale lab NAME', or a small version of it with --quick.", console)


def show_result(result: Result) -> None:
    """Print the tables, the checks and the conclusion of an experiment."""
    console = Console()
    say(f"{result.experiment}: {result.question}", console, "bold")
    for table in result.tables:
        console.print()
        say(table.title, console, "italic")
        print_table(lab_table(table), console)
    console.print()
    for check in result.checks:
        word, style = {True: ("pass", "green"), False: ("fail", "red"), None: ("undecided", "yellow")}[check.holds]
        evidence = "" if check.holds else f": {check.evidence}"
        console.print(Text.assemble((word, style), printable_lines(f" {check.statement}{evidence}")))
    console.print()
    say(result.conclusion, console)
    if (margin := result.settings.get("±")) is not None:
        say(f"±: {margin}.", console, "dim")


def show_progress(training: TwinTraining, step: int, console: Console) -> None:
    """Print the loss, the entropy and 1 − Σp² of both models, every EVERY steps."""
    if step % EVERY and step != training.step_count:
        return
    for at, name in enumerate(training.models):
        loss = statistics.fmean([loss for _, loss in training.losses[name][-SMOOTH:]])
        entropy, trace = (training.records[name][-1].whole(one) for one in ("entropy_ratio", "jacobian_trace"))
        start = f"step {step}" if at == 0 else ""
        say(f"{start:9} {name:18}  loss {loss:.2f}  entropy {entropy:4.0%} of max  1−Σp² {trace:4.0%}", console)


def show_twins(twins: Twins, console: Console) -> None:
    """Print the result, the verdict on each layer of both models, and the explanation."""
    console.print()
    say(twins.verdict, console, "bold")
    for run in twins.runs:
        if run.audit is not None:
            words = ", ".join(f"{layer} {word}" for layer, word in run.audit.words.items())
            say(f"{run.name}: {words}", console)
    for paragraph in twins.explanation:
        console.print()
        say(paragraph, console)
