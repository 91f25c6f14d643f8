"""The demo in the terminal: both models while they train, then what happened."""

import statistics

from rich.console import Console

from attnscale.lab.demo import Twins, TwinTraining
from attnscale.show.terminal import say

SMOOTH = 10  # steps over which a loss is averaged: single batches jump
EVERY = 20  # steps between two lines


def show_progress(training: TwinTraining, step: int, console: Console) -> None:
    """Print the loss, the entropy and 1 − Σp² of both models, once in so many steps."""
    if step % EVERY and step != training.demo.steps:
        return
    for at, name in enumerate(training.models):
        loss = statistics.fmean([loss for _, loss in training.losses[name][-SMOOTH:]])
        entropy, trace = (training.records[name][-1].whole(one) for one in ("entropy_ratio", "jacobian_trace"))
        start = f"step {step}" if at == 0 else ""
        say(f"{start:9} {name:18}  loss {loss:.2f}  entropy {entropy:4.0%} of max  1−Σp² {trace:4.0%}", console)


def show_twins(twins: Twins, console: Console) -> None:
    """Print what happened and why, and the verdict on every layer of either."""
    console.print()
    say(twins.verdict, console, "bold")
    for run in twins.runs:
        if run.audit is not None:
            words = ", ".join(f"{layer} {word}" for layer, word in run.audit.words.items())
            say(f"{run.name}: {words}", console)
    for paragraph in twins.explanation:
        console.print()
        say(paragraph, console)
