"""The largest score of each head since the last step, kept where the model runs: no host waits for it.

Each module that attends carries a tape. Of every call in a run of the module there is a line on it: the largest score
of each head that passed the limit, then the limit, whether queries and keys are of the same positions, and how often it
was called. The last line counts calls that are not known.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call, fold
from attnscale.inside.frames import LOOKS, Look
from attnscale.inside.given import Given
from attnscale.inside.written import Written
from attnscale.measure.largest import raise_largest_
from attnscale.torch_internals import in_backward
from attnscale.visibility import NEVER_A_SCORE, Visibility
from attnscale.watching.written.layout import layout_from

LOOK = "largest"
LIMIT, ATTENDS_ITSELF, CALLS = -3, -2, -1  # behind the heads
BEHIND = 3


def blank_tape(heads: int, limit: float, attends_itself: Sequence[bool], device: torch.device) -> Tensor:
    """A tape on which nothing was noted."""
    tape = torch.full((len(attends_itself) + 1, heads + BEHIND), -torch.inf, device=device)
    tape[:, LIMIT], tape[:, CALLS] = limit, 0.0
    tape[:, ATTENDS_ITSELF] = torch.tensor([*attends_itself, False], dtype=tape.dtype)
    return tape


def _line(tape: Tensor, number: int) -> Tensor | None:
    """Where a call is noted; None for one that is not known, which is counted."""
    if number < len(tape) - 1:
        return tape[number]
    tape[-1, CALLS] += 1.0
    return None


@torch.library.custom_op("attnscale::note_largest", mutates_args=("tape",))
def note_largest(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    hidden_keys: Tensor | None,
    tape: Tensor,
    scale: float,
    is_causal: bool,
    number: int,
) -> None:
    """Note the largest score of each head, inside a compiled graph."""
    _note(query, key, mask, hidden_keys, tape, scale, is_causal, number)


@note_largest.register_fake
def _(*_: Any) -> None:
    return None


def _note(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    hidden: Tensor | None,
    tape: Tensor,
    scale: float,
    is_causal: bool,
    number: int,
) -> None:
    """What a backward pass recomputes was noted before."""
    if in_backward() or tape.device != query.device:  # of a model that was moved since
        return
    line, seen, (batch, _, length, _) = _line(tape, number), Visibility.of(mask, is_causal), query.shape
    if line is None:
        return
    if hidden is not None and hidden.shape[-1] == length:  # of rows of padding nothing is asked
        seen = seen.without_rows(hidden.expand(batch, -1) & (line[ATTENDS_ITSELF] > 0))
    query, key, _, seen = fold(query, key, key, seen, enable_gqa=True)
    call = Call(query, key, key, seen, 0.0, scale, None)
    raise_largest_(line[: query.shape[1]], line[LIMIT], line[CALLS], call)


@torch.library.custom_op("attnscale::note_row_maxima", mutates_args=("tape",))
def note_row_maxima(maxima: Tensor, tape: Tensor, number: int) -> None:
    """Note the largest of the scores that a kernel tells of each row, (batch, heads, rows)."""
    line = None if in_backward() else _line(tape, number)
    if line is not None:
        _raise(line, maxima)


@note_row_maxima.register_fake
def _(*_: Any) -> None:
    return None


@torch.library.custom_op("attnscale::note_scores", mutates_args=("tape",))
def note_scores(scores: Tensor, tape: Tensor, layout: str, number: int) -> None:
    """Note the largest of scores that are written out, inside a compiled graph."""
    _note_scores(scores, tape, layout, number)


@note_scores.register_fake
def _(*_: Any) -> None:
    return None


def _note_scores(scores: Tensor, tape: Tensor, layout: str, number: int) -> None:
    line = None if in_backward() or tape.device != scores.device else _line(tape, number)
    if line is None:
        return
    by_head = layout_from(layout).scores_by_head(scores)
    by_row = by_head.amax(-1)
    if by_head.shape[-1] == by_head.shape[-2]:  # of rows of padding nothing is asked
        hidden = by_head.amax((1, 2)) <= NEVER_A_SCORE
        by_row = by_row.masked_fill((hidden & (line[ATTENDS_ITSELF] > 0)).unsqueeze(1), -torch.inf)
    _raise(line, by_row)


def _raise(line: Tensor, by_row: Tensor) -> None:
    """Lift a line to the largest of (batch, heads, rows); one that is no number counts as ∞."""
    highest = by_row.amax((0, 2)).nan_to_num(torch.inf, torch.inf, -torch.inf).to(line.dtype)
    line[: len(highest)] = torch.maximum(line[: len(highest)], highest)
    line[CALLS] += 1.0


@torch.library.custom_op("attnscale::note_not_known", mutates_args=("tape",))
def note_not_known(tape: Tensor) -> None:
    """Count a call that is not known, inside a compiled graph."""
    if not in_backward():
        _line(tape, len(tape))


@note_not_known.register_fake
def _(*_: Any) -> None:
    return None


def _beyond(tape: Tensor, is_traced: bool) -> None:
    if is_traced and type(tape) is not Tensor:
        note_not_known(tape)
    elif not in_backward():
        _line(tape.data, len(tape))


def _look_at_softmax(written: Written, tape: Tensor, number: int, is_traced: bool) -> None:
    with torch.no_grad():
        scores = written.scores.detach()
        if is_traced and type(tape) is not Tensor:
            note_scores(scores, tape, written.layout, number)
        else:
            _note_scores(scores, tape.data, written.layout, number)


def _look(given: Given, tape: Tensor, number: int, is_traced: bool) -> Given:
    if given.with_row_maxima is not None:
        return replace(given, again=partial(_again, given.with_row_maxima, tape, number))
    with torch.no_grad():
        query, key, mask, hidden = given.query.detach(), given.key.detach(), given.mask, given.hidden_keys
        if is_traced and type(tape) is not Tensor:
            note_largest(query, key, mask, hidden, tape, given.scale, given.is_causal, number)
        else:  # `data`, since a checkpoint may have saved the tape, and refuses what was written to
            _note(query, key, mask, hidden, tape.data, given.scale, given.is_causal, number)
    return given


def _again(
    call: Callable[[Tensor, Tensor], tuple[Any, Tensor]], tape: Tensor, number: int, query: Tensor, key: Tensor
) -> Any:
    """A call that tells of its rows."""
    returned, maxima = call(query, key)
    with torch.no_grad():
        note_row_maxima(maxima.detach(), tape, number)
    return returned


LOOKS[LOOK] = Look(_look, _look_at_softmax, beyond=_beyond)
