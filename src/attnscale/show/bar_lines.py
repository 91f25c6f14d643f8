"""Lines of text below tqdm's bars, drawn by tqdm itself, which knows where on the terminal its bars are."""

import sys
from collections.abc import Sequence
from typing import Any

from attnscale.train.delivery import bars_on_terminal

ERASE_BELOW = "\r\x1b[J"  # all from the line of the cursor on, which is that of the first bar
ROOM = 1  # lines that are left for a bar inside a bar


class BarLines:
    """Text that stays below the bars of a terminal, whatever they and tqdm.write() do."""

    def __init__(self, beside: Any) -> None:
        self._tqdm, self._file = sys.modules["tqdm.std"].tqdm, getattr(beside.fp, "_wrapped", beside.fp)
        self._lines: list[Any] = []

    def show(self, text: Sequence[str]) -> None:
        """Show these lines in place of the last."""
        with self._tqdm.get_lock():
            bars = self._bars()
            for bar in bars:
                self._follow(bar)
            first = 1 + max([ROOM, *(abs(bar.pos) for bar in bars)])
            while len(self._lines) > len(text):
                self._lines.pop().close()
            for index, line in enumerate(text):
                if index == len(self._lines):
                    self._lines.append(self._made(first + index))
                self._lines[index].pos = -first - index
                self._lines[index].set_description_str(line, refresh=False)
            self._draw()

    def close(self) -> None:
        """Leave the last lines standing, above the bars."""
        with self._tqdm.get_lock():
            text = [line.desc for line in self._lines]
            while self._lines:
                self._lines.pop().close()
            self._file.write(ERASE_BELOW)
            self._tqdm.write("\n".join(text), file=self._file)

    def _made(self, position: int) -> Any:
        return self._tqdm(bar_format="{desc}", total=0, position=position, file=self._file, leave=False)

    def _bars(self) -> list[Any]:
        return [bar for bar in bars_on_terminal() if bar not in self._lines]

    def _draw(self) -> None:
        """Draw bars and lines anew, wherever they were drawn last."""
        self._file.write(ERASE_BELOW)
        for bar in (*self._bars(), *self._lines):
            bar.refresh(nolock=True)

    def _follow(self, bar: Any) -> None:
        """Draw the lines again when a bar ends, which moves all that is below it."""
        kind, lines = type(bar), self
        if getattr(kind, "followed_by", None) is lines:
            return

        class Followed(kind):  # type: ignore[misc, valid-type]
            followed_by = lines

            def close(self) -> None:
                if self.disable:  # it ended before
                    return
                with self.get_lock():
                    for line in lines._lines:
                        line.clear(nolock=True)
                    super().close()
                    lines._draw()

        bar.__class__ = Followed
