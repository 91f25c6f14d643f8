"""Whether code runs inside a loop: where a graph ends in one, Dynamo leaves the whole function uncompiled for good."""

import dis
from functools import cache
from types import CodeType, FrameType


def is_in_loop(frame: FrameType) -> bool:
    """Whether the line that a frame is at is inside a loop of its function.

    >>> import sys
    >>> [is_in_loop(sys._getframe()), *(is_in_loop(sys._getframe()) for _ in range(1))]
    [False, True]
    """
    return any(first <= frame.f_lasti <= last for first, last in _loops(frame.f_code))


@cache
def _loops(code: CodeType) -> tuple[tuple[int, int], ...]:
    """From where to where: what jumps back ends a loop."""
    jumps = {*dis.hasjrel, *dis.hasjabs}
    return tuple(
        (each.argval, each.offset)
        for each in dis.get_instructions(code)
        if each.opcode in jumps and each.argval <= each.offset
    )
