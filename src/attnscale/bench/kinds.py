"""The kinds of cases: each a file with its cases and its variants, and a line here."""

from attnscale.bench import dense, ragged
from attnscale.bench.cases import Case

KINDS = {
    "dense": dense,
    "ragged": ragged,
}


def cases(device: str, quick: bool = False, kind: str | None = None) -> list[Case]:
    """The cases of a device, of one kind or of all: those of the documentation, or one small one of each."""
    return [case for name, each in KINDS.items() if kind in (None, name) for case in each.cases(device, quick)]
