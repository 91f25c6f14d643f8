"""Processes that a test starts: they take Ctrl-C whatever the parent does with it, and end with the test."""

import os
import signal
import subprocess
from contextlib import contextmanager, suppress


def _take_interrupts():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is ignored here would be ignored there, and Python keeps to it


@contextmanager
def started(command, **settings):
    """A process in a group of its own, which is killed when the test is over, with all that it started."""
    own = {"start_new_session": True, "preexec_fn": _take_interrupts} if os.name == "posix" else {}
    process = subprocess.Popen(command, **own, **settings)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL) if os.name == "posix" else process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
