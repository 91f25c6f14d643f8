"""The ledger: all numbers and testable statements of four articles, recomputed; and a command for each exercise.

A statement of several articles has one entry, under the article with the strongest wording.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

from attnscale.claims import discussion, post, textbook, tutorial
from attnscale.claims.judging import Claim, judge
from attnscale.errors import SettingError
from attnscale.files import write_whole

RECORDED = "recorded.json"

SOURCES = (post.SOURCE, tutorial.SOURCE, textbook.SOURCE, discussion.SOURCE)


def ledger(ids: Sequence[str] = ()) -> list[Claim]:
    """Judge all claims, grouped by source, or only those with these ids."""
    all_ids = {entry.id for source in SOURCES for entry in source.entries}
    if unknown := [name for name in ids if name not in all_ids]:
        close = get_close_matches(unknown[0], all_ids, n=3)
        meant = f" Did you mean {' or '.join(close)}?" if close else ""
        raise SettingError(f"Unknown claim {unknown[0]!r}.{meant} Run 'attnscale claims --json' to see all ids.")
    return [
        judge(entry, source.name)
        for source in SOURCES for entry in source.entries if not ids or entry.id in ids
    ]  # fmt: skip


def recorded() -> dict[str, str]:
    """Return the recorded verdicts by id."""
    verdicts: dict[str, str] = json.loads((files("attnscale.claims") / RECORDED).read_text(encoding="utf-8"))
    return verdicts


def changed(claims: Iterable[Claim], whole: bool = True) -> list[str]:
    """Describe claims with a changed verdict, new claims and, for a whole ledger, removed claims."""
    before, now = recorded(), {claim.id: claim.verdict for claim in claims}
    before = before if whole else {name: verdict for name, verdict in before.items() if name in now}
    sentences = []
    for name in sorted(before.keys() | now.keys()):
        if name not in before:
            sentences.append(f"'{name}' is new: {now[name]}, with no recorded verdict.")
        elif name not in now:
            sentences.append(f"'{name}' is gone: it was recorded as {before[name]}.")
        elif before[name] != now[name]:
            sentences.append(f"'{name}' changed: it was recorded as {before[name]} and is now {now[name]}.")
    return sentences


def record(claims: Iterable[Claim]) -> None:
    """Write the verdicts to the file that changed() reads."""
    verdicts = {claim.id: claim.verdict for claim in claims}
    text = json.dumps(verdicts, indent=1, sort_keys=True, ensure_ascii=False)
    write_whole(Path(str(files("attnscale.claims") / RECORDED)), text + "\n")


@dataclass(frozen=True)
class Worked:
    """Exercise, listing or worked example of an article, and the command that reproduces it."""

    source: str
    kind: str
    what: str
    command: str


def _explore(**settings: object) -> str:
    view = "&".join(f"{name}={quote(str(value), safe=', ')}" for name, value in settings.items())
    return f'attnscale explore --view "{view}"'


EXERCISE, LISTING, EXAMPLE = "exercise", "listing", "worked example"
LESSON = "jupyter notebook docs/lesson/worksheet.ipynb"

INDEX = (
    Worked("post", EXAMPLE, "Var(q·k/√d_k) = 1", _explore(dim=3, step=7)),
    Worked("post", EXAMPLE, "dividing by d_k instead: variance 1/d_k, weights alike", "attnscale lab divisors"),
    Worked("tutorial", EXAMPLE, "Without scaling one key has nearly all the weight", _explore(d=512)),
    Worked("tutorial", EXAMPLE, "dot products grow with d_k: 4 and 512", "attnscale lab variance"),
    Worked("tutorial", EXAMPLE, "gradients without scaling: at the scores, at the queries, and how they are shared",
           "attnscale lab divisors"),
    Worked("tutorial", EXAMPLE, "the nine terms of (q·k)² at d_k = 3", _explore(dim=3, step=3)),
    Worked("tutorial", EXAMPLE, "the d_k² terms at a larger d_k", _explore(dim=8, step=3)),
    Worked("tutorial", EXAMPLE, "exponentials of 1, 5, 10 and 20 as shares", _explore(scores="1, 5, 10, 20")),
    Worked("tutorial", EXAMPLE, "softmax of [50, 10, 5]", _explore(scores="50, 10, 5")),
    Worked("tutorial", EXAMPLE, "softmax of [5, 1, 0.5]", _explore(scores="5, 1, 0.5")),
    Worked("tutorial", EXAMPLE, "[2, 4, 6] and its half: softmax of both", _explore(scores="2, 4, 6", d=4)),
    Worked("tutorial", EXAMPLE, "q = [1, 0, 1, 0] and k = [0, 1, 1, 1]: a score of 1, scaled 0.5",
           _explore(query="1, 0, 1, 0", key="0, 1, 1, 1")),
    Worked("tutorial", EXAMPLE, "scores [14, 10, 12] at d_k = 64, with and without scaling",
           _explore(scores="14, 10, 12", d=64)),
    Worked("textbook", EXAMPLE, "Var(XY) = 1 of two standard normals", _explore(dim=1, step=4)),
    Worked("textbook", EXAMPLE, "softmax of [8.5, -2.1, 7.9]", _explore(scores="8.5, -2.1, 7.9")),
    Worked("textbook", EXAMPLE, "d_k = 64: spread 8 without, 1 with the scale",
           "attnscale predict --d-model 512 --heads 8"),
    Worked("textbook", EXAMPLE, "five positions, with and without scaling",
           _explore(scores="9.2, -3.1, 8.8, -5.4, 1.2", d=64)),
    Worked("textbook", EXAMPLE, "the softmax Jacobian of [1, 0, 0] and of [0.3, 0.3, 0.2, 0.2]",
           "attnscale lab gradients"),
    Worked("textbook", LISTING, "scaled_dot_product_attention", LESSON),
    Worked("textbook", LISTING, "stable_softmax", LESSON),
    Worked("textbook", EXERCISE, "1. the standard deviation at d_k = 512", "attnscale predict --d-model 512 --heads 1"),
    Worked("textbook", EXERCISE, "2. softmax([x, 0, 0, 0]) as x goes from 0 to 10", "attnscale lab saturation"),
    Worked("textbook", EXERCISE, "3. attention trained with and without scaling", "attnscale demo"),
    Worked("textbook", EXERCISE, "3. the same over head sizes, rates and seeds", "attnscale lab ablation"),
    Worked("textbook", EXERCISE, "4. temperatures of ½√d_k, √d_k and 2√d_k", "attnscale lab temperature"),
    Worked("textbook", EXERCISE, "5. ∂softmax/∂input of peaked and uniform rows", "attnscale lab gradients"),
    Worked("textbook", EXAMPLE, "when scaling matters most: in a trained model", "attnscale lab trained"),
    Worked("textbook", EXAMPLE, "when scaling matters most: all four rows, measured", LESSON),
    Worked("textbook", EXAMPLE, "a learned and a query-dependent temperature: what is learned", LESSON),
    Worked("textbook", EXAMPLE, "a model under other temperatures, on a sentence",
           _explore(sentence="def f(x): return x")),
    Worked("forum", EXAMPLE, "logits [-20, 3, 25, -15], and divided by 8", _explore(scores="-20, 3, 25, -15", d=64)),
    Worked("forum", EXAMPLE, "the constant depends on the initialisation: GPT-2's", _explore(q=0.554, k=0.554)),
    Worked("forum", EXAMPLE, "the same for seven ways to draw weights", "attnscale lab initialisation"),
)  # fmt: skip
