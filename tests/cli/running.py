"""Run the command line from its entry point: in this process, which has imported torch, or in its own."""

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

from attnscale.cli import main

ENVIRONMENT = {"COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}


def in_a_process(*arguments, **environment):
    """Run `attnscale …` as a shell would."""
    return subprocess.run(
        [sys.executable, "-m", "attnscale", *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | ENVIRONMENT | environment,
        check=False,
    )


def run(*arguments, joined=False, **environment):
    """Run `attnscale …` in this process, with streams that are no terminal; `joined` puts stderr into stdout."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    err = out if joined else err
    command = ["attnscale", *map(str, arguments)]
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", command),
        mock.patch.dict(os.environ, ENVIRONMENT | environment),
    ):
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code
    printed, told = (stream.buffer.getvalue().decode("utf-8") for stream in (out, err))
    return subprocess.CompletedProcess(command, status, printed, told)
