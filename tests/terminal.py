"""A pseudo-terminal in which what a program draws stands as a person sees it."""

import os
import re
import struct
import sys
import threading
import time

COLUMNS, ROWS = 80, 40
PLAIN = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "NO_COLOR": "1", "TERM": "xterm"}  # its environment
PATIENCE = 10  # seconds
BELL = "\a"
HALF = re.compile(r"\x1b(\[\??\d*)?$")  # of a sequence, as far as it has arrived
STEERING = re.compile(r"\x1b\[\??(\d*)([A-Za-z])|\r|\n|\a|[^\x1b\r\n\a]+")


class Screen:
    """Lines as they stand, those that were scrolled away too."""

    def __init__(self):
        self._lines, self._row, self._column = [""], 0, 0
        self.bells = 0

    def feed(self, text):
        for found in STEERING.finditer(text):
            self._take(found.group(), int(found.group(1) or 1), found.group(2))

    @property
    def lines(self):
        """Without blank ones at the end, and blanks at the end of each."""
        return "\n".join(line.rstrip() for line in self._lines).rstrip("\n").split("\n")

    def _take(self, text, number, letter):
        line = self._lines[self._row]
        if text == BELL:
            self.bells += 1
        elif text == "\r":
            self._column = 0
        elif text == "\n":
            self._row += 1
            self._lines += [""] * (self._row == len(self._lines))
        elif letter == "A":
            self._row -= number
        elif letter == "K":
            self._lines[self._row] = ""
        elif letter == "J":
            self._lines[self._row :] = [line[: self._column]]
        elif letter is None:
            padded = line.ljust(self._column)
            self._lines[self._row] = padded[: self._column] + text + padded[self._column + len(text) :]
            self._column += len(text)
        else:
            assert letter in "mhl", f"a sign that this terminal does not know: {text!r}"


class Terminal:
    """Both ends of a pseudo-terminal, on which standard output and error are inside `with`."""

    def __init__(self):
        import fcntl
        import termios

        self._near, far = os.openpty()
        fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.file = os.fdopen(far, "w", encoding="utf-8")
        self._screen, self._rung = Screen(), 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        self._before = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = self.file
        return self

    def __exit__(self, *_):
        sys.stdout, sys.stderr = self._before
        self.file.close()
        self._reader.join()
        os.close(self._near)

    def lines(self):
        """What stands there once all that was written has arrived."""
        self._rung += 1
        self.file.write(BELL)
        self.file.flush()
        until = time.monotonic() + PATIENCE
        while self._screen.bells < self._rung:
            self._reader.join(0.001)
            assert self._reader.is_alive()
            assert time.monotonic() < until
        return self._screen.lines

    def _read(self):
        rest = b""
        while True:
            try:
                rest += os.read(self._near, 2**16)
            except OSError:  # the other end is closed
                return
            text = rest.decode("utf-8", "ignore")
            whole = HALF.sub("", text)
            self._screen.feed(whole)
            rest = rest[len(whole.encode()) :]
