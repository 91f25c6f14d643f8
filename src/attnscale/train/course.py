"""Course: a run of any length as few records, for curves; its first and its last as they are."""

from dataclasses import replace

from attnscale.train.record import Record
from attnscale.train.thinning import thin

MOST = 320  # records: as many as a curve has points, and some


class Course:
    """Records that go by, kept as numbers of whole layers, neighbours put together where they become many."""

    def __init__(self) -> None:
        self._kept: list[Record] = []
        self._last: Record | None = None

    def add(self, record: Record) -> None:
        """Note a record that goes by."""
        if self._last is not None:
            self._kept.append(_of_layers(self._last) if self._kept else self._last)
            if len(self._kept) > MOST:
                self._kept = thin(self._kept)
        self._last = record

    @property
    def records(self) -> list[Record]:
        """Those that are kept, in order of steps."""
        return [*self._kept, *([] if self._last is None else [self._last])]


def _of_layers(record: Record) -> Record:
    """A record with one number a layer in place of one a head."""
    layers = {
        name: replace(
            layer,
            numbers={number: [layer.whole(number)] for number in layer.numbers},
            clipped=None if layer.clipped is None else [layer.lowered],
        )
        for name, layer in record.layers.items()
    }
    return replace(record, layers=layers, alarms=[])
